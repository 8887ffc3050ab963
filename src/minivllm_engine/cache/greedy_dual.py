"""An order of eviction: recency, weighed by what each entry is worth."""

import heapq
from dataclasses import dataclass


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
        """Somebody has used an entry."""
        self._uses += 1
        self._put(key, _Entry(self._entries[key].weight, self._clock, self._uses))

    def reweigh(self, key: int, weight: float) -> None:
        """An entry is worth something else now, used or not."""
        entry = self._entries[key]
        self._put(key, _Entry(weight, entry.used_at, entry.last_use))

    def cheapest(self) -> int | None:
        """The entry to give up next: of equal ones that used longest ago. None where there is none."""
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
