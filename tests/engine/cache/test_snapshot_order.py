"""The order of eviction alone."""

import random

import pytest

from minivllm_engine.cache.snapshot_eviction import GreedyDual


def evict_cheapest(order: GreedyDual) -> int | None:
    key = order.cheapest()
    if key is not None:
        order.evict(key)
    return key


def test_of_entries_worth_the_same_the_one_used_longest_ago_goes() -> None:
    order = GreedyDual(3)
    for key in range(3):
        order.add(key, 5.0)
    order.use(0)
    assert [evict_cheapest(order) for _ in range(4)] == [1, 2, 0, None]


def test_an_entry_reweighed_keeps_its_place_in_time() -> None:
    order = GreedyDual(3)
    for key in range(3):
        order.add(key, 5.0)
    order.reweigh(2, 1.0)
    order.reweigh(0, 5.0)
    assert [evict_cheapest(order) for _ in range(3)] == [2, 0, 1]


def test_what_is_worth_four_times_as_much_lasts_three_turnovers_longer() -> None:
    order = GreedyDual(20)
    order.add(0, 4.0)
    for key in range(1, 20):
        order.add(key, 1.0)
    evictions = 0
    while (gone := evict_cheapest(order)) != 0:
        evictions += 1
        order.add(gone, 1.0)
    assert 55 <= evictions <= 85


def test_a_stream_of_entries_worth_little_does_not_make_the_others_old() -> None:
    order = GreedyDual(10)
    for key in range(9):
        order.add(key, 10.0)
    for _ in range(50):  # five turnovers, of entries worth a tenth
        order.add(9, 1.0)
        assert evict_cheapest(order) == 9


@pytest.mark.parametrize("seed", range(3))
def test_it_is_what_a_search_through_all_entries_finds(seed: int) -> None:
    rng = random.Random(seed)
    capacity = 12
    order, clock, uses = GreedyDual(capacity), 0.0, 0
    entries: dict[int, tuple[float, int, float]] = {}  # clock at the last use, its number, weight
    for _ in range(4000):
        key, weight, action = rng.randrange(20), rng.choice([1.0, 2.0, 7.5]), rng.random()
        if key not in entries:
            if len(entries) < capacity:
                uses += 1
                order.add(key, weight)
                entries[key] = (clock, uses, weight)
        elif action < 0.4:
            uses += 1
            order.use(key)
            entries[key] = (clock, uses, entries[key][2])
        elif action < 0.6:
            order.reweigh(key, weight)
            entries[key] = (*entries[key][:2], weight)
        elif action < 0.7:
            order.remove(key)
            del entries[key]
        else:
            gone = min(entries, key=lambda k: (entries[k][0] + entries[k][2], entries[k][1]))
            assert evict_cheapest(order) == gone
            clock += entries.pop(gone)[2] / capacity
        assert order.keys() == set(entries)
