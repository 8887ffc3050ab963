"""Which snapshot is given up for another: what each is worth, and an order that weighs it with recency."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from minivllm_engine.cache.node import Node

# The chances are priors, beside 1 for a snapshot where its conversation is expected to go on; they were
# chosen on the loads of benchmarks/snapshot_eviction.py. Higher ones serve those who branch off a little
# better where there is much room (1/8 in place of 1/64: 2 %), and chats worse where there is little.
#
# Somebody goes back to where a conversation has gone on from: an earlier turn is taken back or forked.
_SUPERSEDED = 1 / 64
# A conversation goes on from its answer as it was computed, where nothing has shown that it does. A chat
# template that leaves out thinking tells the answer otherwise.
_UNTRIED_ANSWER = 1 / 16
# The latest answer is asked for again.
_ANSWERED_AGAIN = 1 / 16


@dataclass(slots=True)
class _Entry:
    weight: float
    used_at: float  # the clock at its last use
    last_use: int

    @property
    def priority(self) -> float:
        return self.used_at + self.weight


class GreedyDual:
    """Which of at most `capacity` entries to give up next, after GreedyDual (Young 1994).

    An entry's priority is the clock at its last use plus its weight, and the lowest goes first. There the
    clock jumps to the priority of what was evicted; here an eviction moves it by the weight of that entry
    over the capacity. Where all weigh the same, both come to that weight a turnover. But with jumps a
    stream of entries worth little, each evicted soon after it was put in, makes all others old.
    All operations take logarithmic time, amortised.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: dict[int, _Entry] = {}
        # A heap; entries that a later use outdated stay for a while.
        self._order: list[tuple[float, int, int]] = []
        self._clock = 0.0
        self._uses = 0

    def add(self, key: int, weight: float) -> None:
        """Put an entry in. That is its first use."""
        assert key not in self._entries and len(self._entries) < self._capacity
        self._uses += 1
        self._put(key, _Entry(weight, self._clock, self._uses))

    def use(self, key: int) -> None:
        """Note that an entry was used now."""
        self._uses += 1
        self._put(key, _Entry(self._entries[key].weight, self._clock, self._uses))

    def reweigh(self, key: int, weight: float) -> None:
        """Change what an entry is worth, used or not."""
        entry = self._entries[key]
        self._put(key, _Entry(weight, entry.used_at, entry.last_use))

    def cheapest(self) -> int | None:
        """Return the entry to evict next, of equal ones that used longest ago, or None."""
        while self._order:
            priority, use, key = self._order[0]
            entry = self._entries.get(key)
            if entry is not None and (entry.priority, entry.last_use) == (priority, use):
                return key
            heapq.heappop(self._order)
        return None

    def evict(self, key: int) -> None:
        """Take an entry out because another needs its room."""
        self._clock += self._entries[key].weight / self._capacity
        self.remove(key)

    def remove(self, key: int) -> None:
        """Take an entry out for another reason."""
        del self._entries[key]

    def keys(self) -> set[int]:
        return set(self._entries)

    def _put(self, key: int, entry: _Entry) -> None:
        self._entries[key] = entry
        heapq.heappush(self._order, (entry.priority, entry.last_use, key))
        if len(self._order) > 4 * self._capacity:
            self._order = [(e.priority, e.last_use, k) for k, e in self._entries.items()]
            heapq.heapify(self._order)


class SnapshotWorth:
    """Says what snapshots are worth, as requests leave and use them: tokens saved, times the chance of that.

    A conversation leaves several snapshots a turn, and mostly comes back to one: the deepest. A snapshot
    that its conversation has gone on from, to one further down, is superseded: it is of use only to whoever
    branches off in between. A branch point is one where that has happened: a request with another
    prompt left the cached path there, or started there although it was superseded. It stands for itself.

    Args:
        reweigh: takes a stored snapshot and the tokens that it is worth from now on.
    """

    def __init__(self, reweigh: Callable[[int, float], None]) -> None:
        self._reweigh = reweigh

    def of_prompt(self, node: Node) -> float:
        """Return tokens that a new snapshot at `node` is worth, where a prompt was computed up to there."""
        self._supersede_above(node)
        return node.saves

    def of_answer(self, node: Node, *, goes_on: bool) -> float:
        """Weigh a snapshot as `of_prompt` does, where an answer was computed up to there.

        Args:
            goes_on: did the conversation go on from its last answer as that was computed?
        """
        above = _above(node)
        node.saves = node.end - above.end
        if above.snapshot is None:
            return node.saves
        if not goes_on:
            return node.saves * _UNTRIED_ANSWER
        # One of the two may have to do for both. Without this one, the answer is computed again; without
        # the one above, all of it is where another answer is asked for.
        if node.saves >= above.end * _ANSWERED_AGAIN:
            self._supersede_above(node)
        return node.saves

    def used(self, node: Node) -> None:
        """Note that a request starts from the snapshot at `node`."""
        assert node.snapshot is not None
        if node.superseded:
            node.superseded, node.branch_point = False, True
        self._reweigh(node.snapshot, node.saves)

    def _supersede_above(self, node: Node) -> None:
        # Ends at the first that is superseded: those above it were seen to then, and what it saves was
        # counted from the one that stands.
        above = _above(node)
        while above.snapshot is not None and not above.branch_point:
            if above.superseded:
                node.saves = node.end - above.end + above.saves
                return
            above.superseded = True
            # Those further up are stored too, so long as it is: a request falls back to the next.
            further = _above(above)
            self._reweigh(above.snapshot, (above.end - further.end) * _SUPERSEDED)
            above = further
        node.saves = node.end - above.end


def _above(node: Node) -> Node:
    """The nearest node above with a snapshot, or else the root."""
    above = node.parent
    assert above is not None
    while above.parent is not None and above.snapshot is None:
        above = above.parent
    return above
