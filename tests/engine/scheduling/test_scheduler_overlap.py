"""Steps that are scheduled and launched while the one before is in flight."""

from collections import Counter

import pytest

from minivllm_engine.scheduling.scheduler import Scheduler
from support.scheduler_simulation import (
    Simulation,
    expected_output,
    make_request,
    make_scheduler,
    run_random_schedule,
)


def test_random_schedules_with_a_step_in_flight_compute_what_each_request_would_alone() -> None:
    seen: Counter[str] = Counter()
    for seed in range(600):
        outcome = run_random_schedule(seed, ahead=True)
        scheduler = outcome.simulation.scheduler
        for request in outcome.requests:
            if request not in outcome.cut_short:
                assert request.output_ids == expected_output(request), seed
        assert scheduler.block_manager.num_available == scheduler.block_manager.num_blocks
        assert scheduler.state_manager.num_free == scheduler.state_manager.num_slots
        assert not scheduler.has_unfinished and outcome.simulation.flight is None
        seen["steps"] += scheduler.num_steps
        seen["ahead"] += outcome.simulation.num_ahead
        seen["preemptions"] += scheduler.num_preemptions
        seen["restored tokens"] += scheduler.cache.restored_tokens
        seen["cached tokens"] += scheduler.cache.cached_tokens
        seen["complete"] += len(outcome.requests) - len(outcome.cut_short)
        seen["cut short"] += len(outcome.cut_short)
    # So that the schedules hold what they are to try.
    assert seen["ahead"] > 0.7 * seen["steps"]
    assert seen["complete"] > 2000 and seen["cut short"] > 500
    assert seen["preemptions"] > 50
    assert seen["cached tokens"] > 10_000 and seen["restored tokens"] > 1_000


def running(count: int, **sizes: int) -> tuple[Simulation, Scheduler]:
    """Requests with one token of prompt, all of them answering, and a step in flight."""
    scheduler = make_scheduler(**sizes)
    simulation = Simulation(scheduler)
    for i in range(count):
        scheduler.add(make_request(i, 1, max_tokens=200))
    while any(not request.output_ids for request in scheduler.live_requests()):
        simulation.step(ahead=True)
    return simulation, scheduler


def test_decodes_that_do_not_fit_into_a_step_take_turns_with_a_step_in_flight_too() -> None:
    simulation, scheduler = running(10, blocks=200, budget=4, slots=10)
    before = {request: len(request.output_ids) for request in scheduler.running}
    for _ in range(50):
        simulation.step(ahead=True)
    gained = [len(request.output_ids) - count for request, count in before.items()]
    assert sum(gained) == 200
    assert max(gained) - min(gained) <= 1


def test_a_prompt_waits_for_the_same_beginning_in_flight_and_then_starts_there() -> None:
    scheduler = make_scheduler(blocks=100, budget=512, snapshots=10)
    simulation = Simulation(scheduler)
    first = make_request(0, 200, max_tokens=30)
    scheduler.add(first)
    batch = scheduler.schedule()
    assert batch.num_tokens == 192  # as far as its snapshot
    late = make_request(1, first.prompt_ids[:195] + (7,) * 60, max_tokens=4)
    same = make_request(2, first.prompt_ids, max_tokens=4)
    scheduler.add(late)
    scheduler.add(same)
    simulation.flight = simulation._launch(batch, None, failed=False)
    for _ in simulation.run_all(ahead=True):
        pass
    for request in (same, late):
        assert request.cache_use is not None and request.cache_use.cached_tokens == 192
    assert simulation.num_ahead > 20


def test_a_step_is_not_launched_ahead_where_that_would_mean_to_preempt() -> None:
    scheduler = make_scheduler(blocks=4, block_size=16, slots=4)
    simulation = Simulation(scheduler)
    # The young one has room left in its blocks when the oldest needs another.
    oldest, young = make_request(0, 15, max_tokens=40), make_request(1, 9, max_tokens=40)
    scheduler.add(oldest)
    scheduler.add(young)
    for steps, _ in enumerate(simulation.run_all(ahead=True), start=1):
        if oldest.status != "finished":
            # It gets its token in every step, but for the first.
            assert len(oldest.output_ids) >= steps
    assert oldest.num_preemptions == 0 and young.num_preemptions > 0
    assert young.output_ids == expected_output(young)


def test_e9_the_one_to_blame_is_found_with_a_step_in_flight() -> None:
    scheduler = make_scheduler(blocks=60, budget=256, slots=6)
    simulation = Simulation(scheduler)
    requests = [make_request(i, 20 + i, max_tokens=12) for i in range(5)]
    for request in requests:
        scheduler.add(request)
    for _ in range(3):
        simulation.step(ahead=True)
    simulation.culprit = bad = requests[3]
    for _ in range(12):
        if bad.status == "finished":
            break
        simulation.step(ahead=True)
    assert bad.status == "finished" and simulation.finished == [bad]
    assert bad.output_ids == expected_output(bad)[: len(bad.output_ids)]
    simulation.culprit = None
    for _ in simulation.run_all(ahead=True):
        pass
    for request in requests:
        if request is not bad:
            assert request.output_ids == expected_output(request)


def test_nothing_is_launched_for_a_token_that_will_be_the_last() -> None:
    scheduler = make_scheduler()
    simulation = Simulation(scheduler)
    request = make_request(0, 5, max_tokens=1)
    scheduler.add(request)
    batch = scheduler.schedule()
    assert scheduler.schedule_ahead() is None
    scheduler.check_integrity()
    scheduler.commit(batch, [7])
    scheduler.finish(request)
    scheduler.check_integrity()
    assert scheduler.num_steps == 1 and simulation.num_ahead == 0
    assert scheduler.block_manager.num_used == scheduler.state_manager.num_used == 0


def test_what_was_restored_by_a_step_that_failed_is_restored_again() -> None:
    # With a budget of one token the step has none for the request that it restores a state for.
    scheduler = make_scheduler(budget=1, slots=2, snapshots=4)
    simulation = Simulation(scheduler)
    first = make_request(0, 70, max_tokens=1)
    scheduler.add(first)
    for _ in simulation.run_all():
        pass
    scheduler.add(make_request(1, 20, max_tokens=2))
    again = make_request(2, first.prompt_ids, max_tokens=4)
    scheduler.add(again)
    batch = simulation.step(fail=True)
    assert batch.restored == (again,) and len(batch.sequences) == 1
    for _ in simulation.run_all(ahead=True):
        pass
    assert again.output_ids == expected_output(again)


@pytest.mark.parametrize("aborted", [False, True])
def test_what_a_look_ahead_admitted_in_vain_is_restored_by_the_next_step(aborted: bool) -> None:
    scheduler = make_scheduler(blocks=9, block_size=16, budget=64, slots=4, snapshots=4)
    simulation = Simulation(scheduler)
    first = make_request(0, 65, max_tokens=1)
    scheduler.add(first)
    for _ in simulation.run_all():
        pass
    ending = make_request(1, 20, max_tokens=2)
    growing = [make_request(2 + i, 15, max_tokens=20) for i in range(2)]
    for request in (ending, *growing):
        scheduler.add(request)
    simulation.step()
    simulation.flight = simulation._launch(scheduler.schedule(), None, failed=False)
    again = make_request(4, first.prompt_ids, max_tokens=4)
    scheduler.add(again)
    # There are blocks to admit it, and then not enough for those that are at the end of theirs.
    simulation.step(ahead=True)
    assert simulation.num_ahead == 0 and again.status == "running"
    assert ending.status == "finished"
    if aborted:
        simulation.abort(again)
    batch = simulation.step(ahead=True)
    assert batch.restored == (() if aborted else (again,)) and again.num_preemptions == 0
    for _ in simulation.run_all(ahead=True):
        pass
    assert again.cache_use is not None and again.cache_use.cached_tokens == 64
    for request in growing if aborted else (again, *growing):
        assert request.output_ids == expected_output(request)
