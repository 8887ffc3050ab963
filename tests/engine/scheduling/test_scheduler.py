"""The scheduler against simulated cache content: every block entry and slot remembers who wrote it."""

import random

import pytest

from support.scheduler_simulation import (
    Simulation,
    expected_output,
    make_request,
    make_scheduler,
    run_random_schedule,
)


@pytest.mark.parametrize("seed", range(300))
def test_random_schedules_compute_what_each_request_would_alone(seed: int) -> None:
    outcome = run_random_schedule(seed, ahead=False)
    scheduler = outcome.simulation.scheduler
    for request in outcome.requests:
        if request not in outcome.cut_short:
            assert request.output_ids == expected_output(request)
    assert scheduler.block_manager.num_available == scheduler.block_manager.num_blocks
    assert scheduler.state_manager.num_free == scheduler.state_manager.num_slots


@pytest.mark.parametrize("budget", [1, 2, 7, 63, 64, 65, 100, 1000])
@pytest.mark.parametrize("block_size", [16, 48, 64, 128])
def test_chunks_end_on_the_grid_or_with_the_budget(budget: int, block_size: int) -> None:
    scheduler = make_scheduler(blocks=40, block_size=block_size, budget=budget, slots=3)
    simulation = Simulation(scheduler)
    for i, length in enumerate([300, 77, 64, 1]):
        scheduler.add(make_request(i, length))
    for batch in simulation.run_all():
        for sequence in batch.sequences:
            end = sequence.start + sequence.length
            if sequence.samples or end % scheduler.interval == 0:
                continue
            next_line = (sequence.start // scheduler.interval + 1) * scheduler.interval
            assert end < next_line, "a chunk ends off the interval although it reached a boundary"
        for sequence in batch.sequences:
            if sequence.start % scheduler.interval:
                line = (sequence.start // scheduler.interval + 1) * scheduler.interval
                assert sequence.start + sequence.length <= line, "a resumed chunk crosses its line"


def test_a_whole_budget_is_used_while_there_is_work() -> None:
    scheduler = make_scheduler(blocks=100, budget=256, slots=8)
    simulation = Simulation(scheduler)
    for i in range(4):
        scheduler.add(make_request(i, 300))
    assert simulation.step().num_tokens == 256


@pytest.mark.parametrize("budget", [1, 2, 7, 64])
def test_decodes_and_prompts_both_make_progress(budget: int) -> None:
    scheduler = make_scheduler(blocks=200, budget=budget, slots=16)
    simulation = Simulation(scheduler)
    decoding = [make_request(i, 1, max_tokens=100) for i in range(10)]
    for request in decoding:
        scheduler.add(request)
    while any(not request.output_ids for request in decoding):
        simulation.step()
    prompt = make_request(99, 500)
    scheduler.add(prompt)
    before = [len(request.output_ids) for request in decoding]
    for _ in range(60):
        simulation.step()
    assert prompt.num_computed_tokens >= min(500, 15 * max(1, budget // 4))
    for request, count in zip(decoding, before, strict=True):
        assert request.status == "finished" or len(request.output_ids) > count


def test_e8_short_prompts_finish_before_the_last_long_one() -> None:
    scheduler = make_scheduler(blocks=1000, budget=128, slots=32)
    simulation = Simulation(scheduler)
    long = [make_request(i, 1000) for i in range(4)]
    short = [make_request(10 + i, 20) for i in range(20)]
    for request in long + short:
        scheduler.add(request)
    for _ in simulation.run_all():
        pass
    order = simulation.finished
    assert max(order.index(r) for r in short) < max(order.index(r) for r in long)
    # Not only before the last: they do not wait for a single whole long prompt each.
    assert max(order.index(r) for r in short) < len(short) + 1


def test_the_oldest_prompt_is_not_starved_by_short_ones() -> None:
    scheduler = make_scheduler(blocks=1000, budget=64, slots=32)
    simulation = Simulation(scheduler)
    long = make_request(0, 1000)
    scheduler.add(long)
    for i in range(1, 1000):
        if long.status == "finished":
            break
        scheduler.add(make_request(i, 60, max_tokens=1))
        simulation.step()
    assert long.status == "finished"


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    scheduler = make_scheduler(blocks=16, block_size=16, budget=64, slots=8)
    simulation = Simulation(scheduler)
    scheduler.add(make_request(0, 30, max_tokens=8))
    large = make_request(1, 230, max_tokens=8)
    scheduler.add(large)
    for i in range(2, 300):
        if large.status == "finished":
            break
        scheduler.add(make_request(i, 30, max_tokens=8))
        simulation.step()
    assert large.status == "finished"


def test_f2_never_more_running_than_slots() -> None:
    scheduler = make_scheduler(blocks=200, slots=4)
    simulation = Simulation(scheduler)
    for i in range(40):
        scheduler.add(make_request(i, 10 + i))
    for _ in simulation.run_all():
        assert len(scheduler.running) <= 4
    assert len(simulation.finished) == 40


def test_f6_the_stated_concurrency_is_reached() -> None:
    scheduler = make_scheduler(blocks=200, slots=6, budget=512)
    simulation = Simulation(scheduler)
    for i in range(12):
        scheduler.add(make_request(i, 20, max_tokens=8))
    assert max(len(batch.sequences) for batch in simulation.run_all()) == 6
    assert scheduler.state_manager.peak_used == 6


def test_a11_aborts_and_failures_leave_no_slot_or_block_behind() -> None:
    rng = random.Random(1)
    scheduler = make_scheduler(blocks=20, slots=5, budget=50)
    simulation = Simulation(scheduler)
    for i in range(500):
        scheduler.add(make_request(i, rng.randint(1, 80), rng.randint(1, 10)))
        if rng.random() < 0.5:
            scheduler.finish(rng.choice(list(scheduler.live_requests())))
        if scheduler.has_unfinished:
            simulation.step(fail=rng.random() < 0.1)
    for _ in simulation.run_all():
        pass
    assert scheduler.block_manager.num_available == 20
    assert scheduler.state_manager.num_free == 5


def test_an_abort_while_a_step_is_in_flight_frees_nothing_before_it_lands() -> None:
    scheduler = make_scheduler()
    request = make_request(0, 20)
    scheduler.add(request)
    batch = scheduler.schedule()
    scheduler.finish(request)
    scheduler.check_integrity()
    assert scheduler.block_manager.num_used == 2
    scheduler.commit(batch, [7])
    scheduler.check_integrity()
    assert scheduler.block_manager.num_used == 0
    assert scheduler.state_manager.num_used == 0


def test_e9_a_failed_step_changes_no_length_and_blames_the_one_that_fails_alone() -> None:
    scheduler = make_scheduler(blocks=40, budget=256)
    simulation = Simulation(scheduler)
    requests = [make_request(i, 30, max_tokens=6) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    simulation.step()
    simulation.step()
    outputs = [list(request.output_ids) for request in requests]
    bad = requests[1]
    for _ in range(20):
        batch = scheduler.schedule()
        fails = any(sequence.request is bad for sequence in batch.sequences)
        tokens = [simulation.run(sequence) for sequence in batch.sequences]
        if fails:
            for request in scheduler.roll_back(batch):
                assert request is bad
                scheduler.finish(request)
            assert [list(r.output_ids) for r in requests[:1]] == outputs[:1] or len(
                requests[0].output_ids
            ) > len(outputs[0])
        else:
            scheduler.commit(batch, tokens)
        scheduler.check_integrity()
        if bad.status == "finished":
            break
    assert bad.status == "finished"
    assert bad.output_ids == outputs[1]
    for _ in simulation.run_all():
        pass
    for request in (requests[0], requests[2]):
        assert request.output_ids == expected_output(request)


def test_preemption_takes_the_youngest_and_the_oldest_is_never_preempted() -> None:
    scheduler = make_scheduler(blocks=4, block_size=16, slots=4)
    simulation = Simulation(scheduler)
    oldest = make_request(0, 15, max_tokens=40)
    young = make_request(1, 15, max_tokens=40)
    scheduler.add(oldest)
    scheduler.add(young)
    for _ in simulation.run_all():
        pass
    assert oldest.num_preemptions == 0
    assert young.num_preemptions >= 1
    assert scheduler.num_preemptions == young.num_preemptions
    assert young.output_ids == expected_output(young)


@pytest.mark.parametrize(
    ("slots", "blocks", "budget", "bound"),
    [(1, 100, 64, "state slots"), (4, 4, 64, "KV blocks"), (4, 100, 16, "token budget")],
)
def test_what_binds_is_named(slots: int, blocks: int, budget: int, bound: str) -> None:
    scheduler = make_scheduler(slots=slots, blocks=blocks, budget=budget)
    simulation = Simulation(scheduler)
    for i in range(3):
        scheduler.add(make_request(i, 40))
    simulation.step()
    assert scheduler.bound_by == bound


def test_integrity_check_sees_a_planted_fault() -> None:
    scheduler = make_scheduler()
    simulation = Simulation(scheduler)
    scheduler.add(make_request(0, 40))
    simulation.step()
    request = scheduler.running[0]
    block = request.block_table[-1]
    request.block_table[-1] = request.block_table[0]
    with pytest.raises(AssertionError):
        scheduler.check_integrity()
    request.block_table[-1] = block
    scheduler.check_integrity()
    request.slot = 3
    with pytest.raises(AssertionError):
        scheduler.check_integrity()
