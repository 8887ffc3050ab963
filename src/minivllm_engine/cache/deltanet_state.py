"""DeltaNet states: a slot for each running request, and snapshots. Plain integers, no tensors."""

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass

from minivllm_engine.cache.snapshot_eviction import GreedyDual


@dataclass(frozen=True, slots=True)
class SnapshotTag:
    """What a snapshot is the state of.

    Attributes:
        model: the model and the dtypes of its states.
        position: tokens that the state has seen.
        prefix: the hash of all of them.
    """

    model: str
    position: int
    prefix: bytes


class DeltaNetStateManager:
    """Hands out state slots 0 to num_slots - 1 and snapshots 0 to num_snapshots - 1.

    A request keeps its slot for as long as it runs. What a freed slot holds is never read: a request
    at position 0 starts from zero whatever is there, and one that starts later from a snapshot.

    A snapshot is free, or reserved by a step that will write it, or stored, and then frozen: it is
    only ever copied into slots. Which stored one is given up for another is decided by `GreedyDual`:
    recency, weighed by the work that it saves. All snapshots are of one size, and so the work is work
    per byte. It is counted by the square root of the tokens saved: else one long prompt would outlive
    hundreds of short ones that are used. What it saves is for `SnapshotWorth` to say.
    """

    def __init__(self, num_slots: int, num_snapshots: int = 0) -> None:
        self.num_slots, self.num_snapshots = num_slots, num_snapshots
        self._free = list(range(num_slots))
        self._held: set[int] = set()
        self._free_snapshots = list(range(num_snapshots))
        self._reserved: set[int] = set()
        self._stored: dict[int, SnapshotTag] = {}
        self._order = GreedyDual(num_snapshots)
        self.peak_used = 0
        self.peak_snapshots = 0
        self.num_evicted = 0

    # -- slots -----------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._held)

    def allocate(self) -> int:
        """Take a free slot. The caller has seen that `num_free` is not 0."""
        assert self._free, "no free state slot"
        # Lowest first: slots in use stay close together, and a decode step then reads one range.
        slot = heapq.heappop(self._free)
        self._held.add(slot)
        self.peak_used = max(self.peak_used, len(self._held))
        return slot

    def release(self, slot: int) -> None:
        """Free a slot that is held."""
        assert slot in self._held, f"slot {slot} is released but not held"
        self._held.remove(slot)
        heapq.heappush(self._free, slot)

    # -- snapshots -------------------------------------------------------------------------------

    @property
    def num_stored(self) -> int:
        return len(self._stored)

    def reserve_snapshot(self) -> int | None:
        """Reserve a free snapshot for a step to write. None where there is none: see `cheapest_snapshot`."""
        if not self._free_snapshots:
            return None
        snapshot = self._free_snapshots.pop()
        self._reserved.add(snapshot)
        return snapshot

    def store_snapshot(self, snapshot: int, tag: SnapshotTag, tokens_saved: float) -> None:
        """Store a reserved snapshot, which has been written and is expected to save so many tokens."""
        self._reserved.remove(snapshot)
        self._stored[snapshot] = tag
        self._order.add(snapshot, math.sqrt(tokens_saved))
        self.peak_snapshots = max(self.peak_snapshots, len(self._stored))

    def use_snapshot(self, snapshot: int, tag: SnapshotTag) -> None:
        """Note that a request starts from it. It must be the state that the request needs, and no other."""
        stored = self._stored[snapshot]
        assert stored == tag, f"snapshot {snapshot} is {stored}, wanted {tag}"
        self._order.use(snapshot)

    def reweigh_snapshot(self, snapshot: int, tokens_saved: float) -> None:
        """Weigh a stored snapshot anew: it is expected to save so many tokens from now on."""
        self._order.reweigh(snapshot, math.sqrt(tokens_saved))

    def cheapest_snapshot(self) -> int | None:
        """Return the stored snapshot to give up next. None where none is stored."""
        return self._order.cheapest()

    def evict_snapshot(self, snapshot: int) -> None:
        """Free a stored snapshot because another needs the room."""
        del self._stored[snapshot]
        self._order.evict(snapshot)
        self._free_snapshots.append(snapshot)
        self.num_evicted += 1

    def free_snapshot(self, snapshot: int) -> None:
        """Free a reserved or stored snapshot."""
        if snapshot in self._reserved:
            self._reserved.remove(snapshot)
        else:
            del self._stored[snapshot]
            self._order.remove(snapshot)
        self._free_snapshots.append(snapshot)

    def tag_of(self, snapshot: int) -> SnapshotTag:
        return self._stored[snapshot]

    # -- integrity -------------------------------------------------------------------------------

    def check_integrity(self, slots: Iterable[int], reserved: Iterable[int] = ()) -> None:
        """Prove that slots and reserved snapshots are exactly those of the requests, each once."""
        owned = list(slots)
        assert len(set(owned)) == len(owned), "a slot has two owners"
        assert set(owned) == self._held, "held slots disagree with the running requests"
        assert not self._held & set(self._free), "a slot is both free and held"
        assert len(self._free) + len(self._held) == self.num_slots, "a slot is lost"
        writers = list(reserved)
        assert len(set(writers)) == len(writers), "two sequences write one snapshot"
        assert set(writers) == self._reserved, "reserved snapshots disagree with the step in flight"
        assert self._order.keys() == set(self._stored), "the order of eviction misses a snapshot"
        groups = [*self._free_snapshots, *self._reserved, *self._stored]
        assert sorted(groups) == list(range(self.num_snapshots)), (
            "a snapshot is lost, or held twice"
        )
