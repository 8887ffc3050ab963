"""The scheduler against simulated cache content: every block entry and slot remembers who wrote it."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from minivllm_engine.block_manager import BlockManager
from minivllm_engine.deltanet_state import DeltaNetStateManager
from minivllm_engine.prefix_cache import PrefixCache
from minivllm_engine.request import Request, ResolvedSampling
from minivllm_engine.scheduler import ScheduledBatch, Scheduler


def make_scheduler(
    *,
    blocks: int = 32,
    block_size: int = 16,
    slots: int = 4,
    budget: int = 64,
    snapshots: int = 0,
) -> Scheduler:
    cache = PrefixCache(
        BlockManager(blocks, block_size),
        DeltaNetStateManager(slots, snapshots),
        enabled=snapshots > 0,
    )
    return Scheduler(cache, max_num_batched_tokens=budget)


def make_request(
    number: int, prompt: int | tuple[int, ...], max_tokens: int = 4, **values: Any
) -> Request:
    """`prompt`: its ids, or how many random ones."""
    if isinstance(prompt, int):
        rng = random.Random(number)
        prompt = tuple(rng.randrange(1000) for _ in range(prompt))
    params = ResolvedSampling(seed=0, max_tokens=max_tokens)
    return Request(str(number), prompt, params, number, 0, len(prompt) + max_tokens, **values)


class Simulation:
    """Runs a scheduler with a 'model' whose next token is a hash of all tokens before it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.kv: dict[tuple[int, int], int] = {}  # (block, offset) -> hash of all tokens up to it
        self.states: dict[int, int] = {}
        self.snapshots: dict[int, int] = {}
        self.finished: list[Request] = []

    def step(self, *, fail: bool = False) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        assert batch.sequences, "a step without work while requests are unfinished"
        self.check_shape(batch)
        for snapshot, slot in batch.restores:
            self.states[slot] = self.snapshots[snapshot]
        tokens = [self.run(sequence, scramble=fail) for sequence in batch.sequences]
        if fail:
            for request in self.scheduler.roll_back(batch):
                self.scheduler.finish(request)
                self.finished.append(request)
        else:
            self.scheduler.commit(batch, tokens)
            for sequence in batch.sequences:
                request = sequence.request
                if request.num_tokens >= request.max_total_tokens and request.status == "running":
                    self.scheduler.finish(request)
                    self.finished.append(request)
        self.scheduler.check_integrity()
        return batch

    def check_shape(self, batch: ScheduledBatch) -> None:
        assert batch.num_tokens <= self.scheduler.max_num_batched_tokens
        slots = [sequence.slot for sequence in batch.sequences]
        assert len(set(slots)) == len(slots)
        assert all(0 <= slot < self.scheduler.state_manager.num_slots for slot in slots)
        assert [s.length == 1 for s in batch.sequences] == [
            i < batch.num_decodes for i in range(len(batch.sequences))
        ]

    def run(self, sequence, *, scramble: bool) -> int | None:
        request, size = sequence.request, self.scheduler.block_manager.block_size
        known = request.token_ids(0, request.num_tokens)
        for position in range(sequence.start):
            entry = (sequence.block_table[position // size], position % size)
            assert self.kv.get(entry) == hash(tuple(known[: position + 1])), "a wrong KV entry"
        if sequence.start:
            assert self.states[sequence.slot] == hash(tuple(known[: sequence.start]))
        end = sequence.start + sequence.length
        for position in range(sequence.start, end):
            entry = (sequence.block_table[position // size], position % size)
            self.kv[entry] = -1 if scramble else hash(tuple(known[: position + 1]))
        self.states[sequence.slot] = -1 if scramble else hash(tuple(known[:end]))
        if sequence.snapshot is not None:
            assert end % self.scheduler.grid == 0, "a snapshot off the grid"
            self.snapshots[sequence.snapshot] = self.states[sequence.slot]
        return hash(tuple(known)) % 1000 if sequence.samples else None

    def run_all(self, limit: int = 100_000) -> Iterator[ScheduledBatch]:
        for _ in range(limit):
            if not self.scheduler.has_unfinished:
                return
            yield self.step()
        pytest.fail(f"not finished after {limit} steps")


def expected_output(request: Request) -> list[int]:
    tokens = list(request.prompt_ids)
    while len(tokens) < request.max_total_tokens:
        tokens.append(hash(tuple(tokens)) % 1000)
    return tokens[len(request.prompt_ids) :]


def random_scheduler(rng: random.Random) -> Scheduler:
    return make_scheduler(
        blocks=rng.choice([8, 12, 20, 40]),
        block_size=rng.choice([16, 32, 48, 64, 128]),
        slots=rng.choice([1, 2, 3, 8]),
        budget=rng.choice([1, 2, 7, 63, 64, 65, 200, 2048]),
        snapshots=rng.choice([0, 1, 2, 3, 50]),
    )


def related_prompts(rng: random.Random, count: int, longest: int) -> list[tuple[int, ...]]:
    """Prompts that begin like one another for a while, repeat one another, or share nothing."""
    prompts: list[tuple[int, ...]] = []
    for _ in range(count):
        beginning: tuple[int, ...] = ()
        if prompts and rng.random() < 0.7:
            other = rng.choice(prompts)
            beginning = other[: rng.choice([len(other), rng.randint(0, len(other))])]
        length = rng.randint(max(1, len(beginning)), max(longest, len(beginning)))
        rest = tuple(rng.randrange(1000) for _ in range(length - len(beginning)))
        prompts.append(beginning + rest)
    return prompts


@pytest.mark.parametrize("seed", range(300))
def test_random_schedules_compute_what_each_request_would_alone(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = random_scheduler(rng)
    simulation = Simulation(scheduler)
    pool = scheduler.block_manager.num_blocks * scheduler.block_manager.block_size
    requests, aborted = [], set()
    prompts = related_prompts(rng, rng.randint(1, 9), min(200, pool - 80))
    pending = [
        make_request(1000 * seed + i, prompt, max_tokens=rng.choice([1, 2, 5, 16, 70]))
        for i, prompt in enumerate(prompts)
    ]
    while pending or scheduler.has_unfinished:
        while pending and rng.random() < 0.5:
            requests.append(pending.pop(0))
            scheduler.add(requests[-1])
        live = list(scheduler.live_requests())
        if live and rng.random() < 0.05:
            victim = rng.choice(live)
            scheduler.finish(victim)
            aborted.add(victim)
            scheduler.check_integrity()
        if scheduler.has_unfinished:
            failing = rng.random() < 0.02
            before = len(simulation.finished)
            simulation.step(fail=failing)
            if failing:
                aborted.update(simulation.finished[before:])
    for request in requests:
        if request not in aborted:
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
            if sequence.samples or end % scheduler.grid == 0:
                continue
            next_line = (sequence.start // scheduler.grid + 1) * scheduler.grid
            assert end < next_line, "a chunk ends off the grid although it reached a grid line"
        for sequence in batch.sequences:
            if sequence.start % scheduler.grid:
                line = (sequence.start // scheduler.grid + 1) * scheduler.grid
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
        tokens = [simulation.run(sequence, scramble=fails) for sequence in batch.sequences]
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
