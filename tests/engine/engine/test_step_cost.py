"""F4: what one step of the scheduler may cost, beside a prompt of 32,000 tokens and a cache that is full.

The cost is counted: tokens that are computed, and instructions of Python that decide about them. Seconds
would say little: on a machine that others use a step takes ten times as long now and then, and a limit that
stands that would let pass what it is for, an eviction that walks through the whole cache, say.
"""

import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import minivllm_engine
from minivllm_engine.core.request import Request
from minivllm_engine.scheduling.scheduled_batch import ScheduledBatch
from support.scheduler_simulation import make_request, make_scheduler

ENGINE = str(Path(minivllm_engine.__file__).parent)
BUDGET, BLOCK = 2048, 64
# Measured with Python 3.11: 28,000 in a step, and 825 for each block of a prompt that is new to the engine.
MOST, MOST_A_HASH = 45_000, 1_000


class Instructions:
    """Counts the bytecode of the engine that runs within."""

    def __init__(self) -> None:
        self.count = 0
        self._ours: dict[CodeType, bool] = {}

    def __enter__(self) -> "Instructions":
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if not self._ours.setdefault(code, code.co_filename.startswith(ENGINE)):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._count

    def _count(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        self.count += event == "opcode"
        return self._count


class Steps:
    """Runs a scheduler without a model, and counts."""

    def __init__(self, *, blocks: int, snapshots: int, slots: int) -> None:
        self.scheduler = make_scheduler(
            blocks=blocks, block_size=BLOCK, slots=slots, budget=BUDGET, snapshots=snapshots
        )
        self.computed = self.most = 0
        self.finished: list[Request] = []
        self.counts = True
        self.overlaps = False
        self.flight: ScheduledBatch | None = None

    def step(self) -> None:
        hashed = -self._num_hashed()
        with Instructions() if self.counts else nullcontext(Instructions()) as run:
            batch = self.flight or self.scheduler.schedule()
            self.flight = self.scheduler.schedule_ahead() if self.overlaps else None
            assert 0 < batch.num_tokens <= BUDGET
            tokens = [sequence.request.num_tokens % 1000 for sequence in batch.sequences]
            self.scheduler.commit(
                batch,
                [t if s.samples else None for t, s in zip(tokens, batch.sequences, strict=True)],
            )
            hashed += self._num_hashed()
            for request in list(self.scheduler.running):
                if request.num_tokens >= request.max_total_tokens:
                    self.scheduler.finish(request)
                    self.finished.append(request)
        self.computed += batch.num_tokens
        cost = run.count - MOST_A_HASH * hashed
        self.most = max(self.most, cost)
        assert cost <= MOST, f"{run.count} instructions with {hashed} new hashes"

    def _num_hashed(self) -> int:
        requests = [*self.scheduler.running, *self.scheduler.waiting]
        return sum(len(request.block_hashes) for request in requests)

    def run(self) -> None:
        while self.scheduler.has_unfinished:
            self.step()
        self.scheduler.check_integrity()

    def add(self, number: int, prompt: tuple[int, ...], max_tokens: int) -> Request:
        request = make_request(number, prompt, max_tokens)
        self.scheduler.add(request)
        return request


def prompt(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1000) for _ in range(length))


def filled(blocks: int) -> Steps:
    """A cache in which every block is taken, and every snapshot, by prompts of 200 tokens."""
    steps = Steps(blocks=blocks, snapshots=blocks // 4, slots=8)
    steps.counts = False
    for number in range(blocks // 3 + 1):
        steps.add(number, prompt(number, 200), 2)
        steps.run()
    cache = steps.scheduler.cache
    assert cache.states.num_stored == blocks // 4 and cache.states.num_evicted > 0
    assert cache.num_evicted_blocks > 0
    steps.computed, steps.finished, steps.counts = 0, [], True
    return steps


def test_f4_a_32k_prompt_in_a_full_cache_costs_its_tokens_and_holds_nobody_up() -> None:
    steps = filled(1000)
    newest = 1000 // 3
    # Four that go on from cached prompts, whose blocks are then in use, and answer all the while.
    answering = [
        steps.add(2000 + i, prompt(newest - i, 200) + prompt(3000 + i, 9), 200) for i in range(4)
    ]
    for _ in range(3):
        steps.step()
    assert all(request.cache_use.cached_tokens == 192 for request in answering)
    long = steps.add(5000, prompt(5000, 32_000), 4)
    steps.step()
    late = [steps.add(6000 + i, prompt(6000 + i, 300), 4) for i in range(3)]
    before = [request.num_tokens for request in answering]
    for done in range(1, 7):
        steps.step()
        assert [r.num_tokens for r in answering] == [n + done for n in before], "one token a step"
    assert all(request in steps.finished for request in late), "in 6 steps, behind the long one"
    assert long not in steps.finished
    steps.run()
    assert long in steps.finished and len(steps.finished) == 8
    assert steps.scheduler.num_preemptions == 0
    # Every token once, but for what was cached; the last of each is never computed.
    assert steps.computed == sum(r.num_tokens - 1 for r in steps.finished) - 4 * 192


def test_f4_what_a_step_costs_does_not_grow_with_the_cache() -> None:
    most = []
    for blocks in (300, 1200):
        steps = filled(blocks)
        steps.add(5000, prompt(5000, 12_000), 4)
        steps.run()
        most.append(steps.most)
    assert 0 < most[1] < 1.2 * most[0]


def test_f4_a_step_that_is_scheduled_ahead_costs_no_more() -> None:
    most, ahead = [], 0
    for overlaps in (False, True):
        steps = filled(300)
        steps.overlaps = overlaps
        for i in range(7):
            steps.add(2000 + i, prompt(2000 + i, 30), 40)
        steps.add(5000, prompt(5000, 12_000), 30)
        while steps.scheduler.has_unfinished:
            steps.step()
            ahead += steps.flight is not None
        assert steps.flight is None and len(steps.finished) == 8
        assert steps.computed == sum(r.num_tokens - 1 for r in steps.finished)
        most.append(steps.most)
    assert ahead > 30
    assert 0 < most[1] < 1.1 * most[0]


@pytest.mark.parametrize(
    ("length", "answer", "preempts"), [(20_000, 50, False), (9_200, 600, True)]
)
def test_f4_large_prompts_that_have_no_room_together_come_to_an_end(
    length: int, answer: int, preempts: bool
) -> None:
    steps = filled(600)
    large = [steps.add(7000 + i, prompt(7000 + i, length), answer) for i in range(4)]
    steps.run()
    assert {request.request_id for request in steps.finished} == {r.request_id for r in large}
    assert (steps.scheduler.num_preemptions > 0) is preempts
    # Nothing is begun in vain over and over.
    assert steps.computed <= 1.5 * sum(request.num_tokens for request in large)
