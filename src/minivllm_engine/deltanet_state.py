"""DeltaNet state slots: one for each running request. Plain integers, no tensors."""

import heapq
from collections.abc import Iterable


class DeltaNetStateManager:
    """Hands out state slots 0 to num_slots - 1. A request keeps its slot for as long as it runs.

    What a freed slot holds is never read: a request at position 0 starts from zero whatever is there.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._held: set[int] = set()
        self.peak_used = 0

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

    def check_integrity(self, slots: Iterable[int]) -> None:
        """Prove that the slots of all running requests are the held ones, each once."""
        owned = list(slots)
        assert len(set(owned)) == len(owned), "a slot has two owners"
        assert set(owned) == self._held, "held slots disagree with the running requests"
        assert not self._held & set(self._free), "a slot is both free and held"
        assert len(self._free) + len(self._held) == self.num_slots, "a slot is lost"
