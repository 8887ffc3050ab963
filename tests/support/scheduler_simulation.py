"""A scheduler with a simulated model: every block entry, slot and snapshot remembers what was written to it.

The device of the simulation takes steps in the order of their launch, as a stream does, and tells what they
gave when they are collected. So a step may be launched while the one before is in flight.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from minivllm_engine.cache.block_manager import BlockManager
from minivllm_engine.cache.deltanet_state import DeltaNetStateManager
from minivllm_engine.cache.prefix_cache import PrefixCache
from minivllm_engine.core.request import Request
from minivllm_engine.core.sampling_params import ResolvedSampling
from minivllm_engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledSequence
from minivllm_engine.scheduling.scheduler import Scheduler

BROKEN = "written by a step that failed"


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
    number: int,
    prompt: int | tuple[int, ...],
    max_tokens: int = 4,
    *,
    ignore_eos: bool = True,
    index: int = 0,
    **values: Any,
) -> Request:
    """`prompt`: its ids, or how many random ones."""
    if isinstance(prompt, int):
        rng = random.Random(number)
        prompt = tuple(rng.randrange(1000) for _ in range(prompt))
    params = ResolvedSampling(seed=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
    total = len(prompt) + max_tokens
    return Request(str(number), prompt, params, number, index, total, **values)


def digests(tokens: Sequence[int]) -> list[int]:
    """Of all tokens up to each: what is written to its entry, and the state after it."""
    found, last = [], 0
    for token in tokens:
        last = hash((last, token))
        found.append(last)
    return found


def next_token(digest: int, index: int) -> int:
    return hash((digest, index)) % 1000


def ends(request: Request) -> bool:
    """Has it all its tokens, or has the model ended it?"""
    stopped = not request.params.ignore_eos and request.output_ids[-1:] != []
    return request.num_tokens >= request.max_total_tokens or (
        stopped and request.output_ids[-1] % 10 == 0
    )


def expected_output(request: Request) -> list[int]:
    """What the request gives alone."""
    alone = replace(request, output_ids=[])
    digest = digests(request.prompt_ids)[-1]
    while not ends(alone):
        alone.output_ids.append(next_token(digest, request.index))
        digest = hash((digest, alone.output_ids[-1]))
    return alone.output_ids


@dataclass(frozen=True)
class Flight:
    """A step that was launched: the tokens that it will be seen to have given, one a sequence."""

    batch: ScheduledBatch
    tokens: list[int | None]
    failed: bool

    def token_of(self, request: Request) -> int:
        (token,) = (
            token
            for sequence, token in zip(self.batch.sequences, self.tokens, strict=True)
            if sequence.request is request
        )
        assert token is not None, "a token is awaited that no step gives"
        return token


class Simulation:
    """Runs a scheduler with a 'model' whose next token is a hash of all tokens before it.

    Attributes:
        flight: the step in flight between two calls of `step`; None where steps are not overlapped.
        num_ahead: steps that were launched while the one before was in flight.
        culprit: every step with it fails.
        between: called when a step has been launched ahead, before the one before is collected.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.kv: dict[tuple[int, int], object] = {}  # (block, offset) -> digest
        self.states: dict[int, object] = {}
        self.snapshots: dict[int, object] = {}
        self.finished: list[Request] = []
        self.flight: Flight | None = None
        self.num_ahead = 0
        self.culprit: Request | None = None
        self.between: Callable[[], None] = lambda: None
        self._collecting: Flight | None = None
        self._ended: dict[Request, tuple[set[int], int]] = {}  # what they held, until it landed

    # -- steps -----------------------------------------------------------------------------------

    def step(
        self, *, fail: bool = False, ahead: bool = False, fail_ahead: bool = False
    ) -> ScheduledBatch:
        """Collect one step, with the next one launched before if that is wanted and possible.

        Args:
            fail: it fails, which is told when it is collected.
            fail_ahead: the next one fails, which is told when it is launched.
        """
        flight = self.flight
        if flight is None:
            batch = self.scheduler.schedule()
            assert batch.sequences, "a step without work while requests are unfinished"
            flight = self._launch(batch, None, failed=fail and not ahead)
            self.scheduler.check_integrity()
        self.flight = None
        batch_ahead = None
        if ahead and not flight.failed:
            batch_ahead = self.scheduler.schedule_ahead()
            self.scheduler.check_integrity()
        if fail and not flight.failed:
            self._break(flight.batch)
            flight = replace(flight, failed=True)
        if batch_ahead is not None:
            assert batch_ahead.sequences
            self.num_ahead += 1
            # What it starts from is broken if the step before it is.
            self.flight = self._launch(batch_ahead, flight, failed=flight.failed or fail_ahead)
            self._collecting = flight
            self.between()
            self._collecting = None
        self._collect(flight)
        self._check_content()
        if self.flight is not None and not self.scheduler.has_unfinished:
            self._land_unseen(self.flight)
        return flight.batch

    def finish(self, request: Request) -> None:
        """End a request; what it holds must not be taken by a step before those in flight landed."""
        if any(s.request is request for f in self._flying() for s in f.batch.sequences):
            assert request.slot is not None
            self._ended[request] = (set(request.block_table), request.slot)
        self.scheduler.finish(request)
        self.scheduler.check_integrity()

    def abort(self, request: Request) -> None:
        """End a request with a step in flight, or two."""
        self.finish(request)
        alone = self._collecting is None and not self.scheduler.has_unfinished
        if self.flight is not None and alone:
            self._land_unseen(self.flight)

    def run_all(self, limit: int = 100_000, *, ahead: bool = False) -> Iterator[ScheduledBatch]:
        for _ in range(limit):
            if not self.scheduler.has_unfinished:
                return
            yield self.step(ahead=ahead)
        pytest.fail(f"not finished after {limit} steps")

    def _flying(self) -> list[Flight]:
        return [flight for flight in (self._collecting, self.flight) if flight is not None]

    def _launch(self, batch: ScheduledBatch, before: Flight | None, *, failed: bool) -> Flight:
        self._check_shape(batch)
        self._check_writes(batch)
        for snapshot, slot in batch.restores:
            self.states[slot] = self.snapshots[snapshot]
        if failed or any(s.request is self.culprit for s in batch.sequences):
            self._break(batch)
            return Flight(batch, [None] * len(batch.sequences), failed=True)
        return Flight(batch, [self.run(s, before) for s in batch.sequences], failed=False)

    def _collect(self, flight: Flight) -> None:
        if flight.failed:
            self.flight = None
            for request in self.scheduler.roll_back(flight.batch):
                if request.status != "finished":
                    self.scheduler.finish(request)
                    self.finished.append(request)
            self._ended.clear()
        else:
            self.scheduler.commit(flight.batch, flight.tokens)
            self._forget_landed()
            for sequence in flight.batch.sequences:
                request = sequence.request
                if request.status == "running" and ends(request):
                    self.finish(request)
                    self.finished.append(request)
        self.scheduler.check_integrity()

    def _land_unseen(self, flight: Flight) -> None:
        """Nobody waits for it any more."""
        self.flight = None
        self.scheduler.commit(flight.batch, [None] * len(flight.batch.sequences))
        self._forget_landed()
        self.scheduler.check_integrity()

    def _forget_landed(self) -> None:
        flying = {s.request for f in self._flying() for s in f.batch.sequences}
        self._ended = {r: held for r, held in self._ended.items() if r in flying}

    # -- the model -------------------------------------------------------------------------------

    def run(self, sequence: ScheduledSequence, before: Flight | None = None) -> int | None:
        """Check what a sequence reads, write what it computes, and return its token if it samples."""
        request, start = sequence.request, sequence.start
        end = start + sequence.length
        known = request.token_ids(0, request.num_tokens)
        assert end < request.max_total_tokens, "a token that is needed for nothing"
        assert sequence.awaits == (end > len(known))
        if sequence.awaits:
            assert before is not None and sequence.length == 1
            known.append(before.token_of(request))
        found = digests(known[:end])
        for position in range(start):
            assert self.kv.get(self._entry(sequence, position)) == found[position], "a wrong entry"
        if start:
            assert self.states[sequence.slot] == found[start - 1], "a wrong state"
        for position in range(start, end):
            self.kv[self._entry(sequence, position)] = found[position]
        self.states[sequence.slot] = found[-1]
        if sequence.snapshot is not None:
            assert end % self.scheduler.interval == 0, "a snapshot off the interval"
            self.snapshots[sequence.snapshot] = found[-1]
        assert sequence.samples == (end == len(known))
        return next_token(found[-1], request.index) if sequence.samples else None

    def _break(self, batch: ScheduledBatch) -> None:
        for _, slot in batch.restores:
            self.states[slot] = BROKEN
        for sequence in batch.sequences:
            for position in range(sequence.start, sequence.start + sequence.length):
                self.kv[self._entry(sequence, position)] = BROKEN
            self.states[sequence.slot] = BROKEN
            if sequence.snapshot is not None:
                self.snapshots[sequence.snapshot] = BROKEN

    def _entry(self, sequence: ScheduledSequence, position: int) -> tuple[int, int]:
        size = self.scheduler.block_manager.block_size
        return sequence.block_table[position // size], position % size

    # -- checks ----------------------------------------------------------------------------------

    def _check_shape(self, batch: ScheduledBatch) -> None:
        assert batch.num_tokens <= self.scheduler.max_num_batched_tokens
        slots = [sequence.slot for sequence in batch.sequences]
        assert len(set(slots)) == len(slots)
        assert all(0 <= slot < self.scheduler.state_manager.num_slots for slot in slots)
        assert [s.length == 1 for s in batch.sequences] == [
            i < batch.num_decodes for i in range(len(batch.sequences))
        ]

    def _check_writes(self, batch: ScheduledBatch) -> None:
        """A step writes nothing that a request held which ended with a step still in flight."""
        slots = {s.slot for s in batch.sequences} | {slot for _, slot in batch.restores}
        blocks = {
            self._entry(s, position)[0]
            for s in batch.sequences
            for position in range(s.start, s.start + s.length)
        }
        for held, slot in self._ended.values():
            assert slot not in slots, "the slot of a request whose step has not landed"
            assert not held & blocks, "blocks of a request whose step has not landed"

    def _check_content(self) -> None:
        """What is cached is what its node says, and what was committed is there."""
        scheduler, size = self.scheduler, self.scheduler.block_manager.block_size
        below: list[tuple[Any, int]] = [(node, 0) for node in scheduler.cache.roots()]
        while below:
            node, digest = below.pop()
            for offset, token in enumerate(node.token_ids):
                digest = hash((digest, token))
                assert self.kv[node.block, offset] == digest, "a wrong entry is cached"
            if node.snapshot is not None:
                assert self.snapshots[node.snapshot] == digest, "a wrong snapshot is stored"
            below += [(child, digest) for child in node.children.values()]
        for request in scheduler.running:
            tokens = request.token_ids(0, request.num_computed_tokens)
            for position, digest in enumerate(digests(tokens)):
                entry = request.block_table[position // size], position % size
                assert self.kv.get(entry) == digest, "a committed entry is lost"


def random_scheduler(rng: random.Random, *, crowded: bool) -> Scheduler:
    return make_scheduler(
        blocks=rng.choice([6, 7, 8] if crowded else [8, 12, 20, 40]),
        block_size=16 if crowded else rng.choice([16, 32, 48, 64, 128]),
        slots=8 if crowded else rng.choice([1, 2, 3, 8]),
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


@dataclass
class Outcome:
    """How a random schedule went: its requests, and those that did not run to their end."""

    requests: list[Request]
    cut_short: set[Request]
    simulation: Simulation


def run_random_schedule(seed: int, *, ahead: bool) -> Outcome:
    """Requests that come, share beginnings, are aborted, preempted and let down by steps that fail."""
    rng = random.Random(seed)
    aborting, failing = rng.choice([0.0, 0.005, 0.05]), rng.choice([0.0, 0.02])
    crowded = rng.random() < 0.3
    scheduler = random_scheduler(rng, crowded=crowded)
    simulation = Simulation(scheduler)
    pool = scheduler.block_manager.num_blocks * scheduler.block_manager.block_size
    requests: list[Request] = []
    cut_short: set[Request] = set()
    pending: list[Request] = []
    for prompt in related_prompts(rng, rng.randint(1, 9), min(200, pool - 80)):
        max_tokens = rng.choice([16, 70] if crowded else [1, 2, 5, 16, 70])
        ignore_eos = rng.random() < (0.8 if crowded else 0.5)
        for index in range(rng.choice([1, 1, 1, 2, 3])):
            number = 1000 * seed + len(pending)
            pending.append(
                make_request(number, prompt, max_tokens, ignore_eos=ignore_eos, index=index)
            )

    def abort_one() -> None:
        live = list(scheduler.live_requests())
        if live and rng.random() < aborting:
            victim = rng.choice(live)
            simulation.abort(victim)
            cut_short.add(victim)

    simulation.between = abort_one
    while pending or scheduler.has_unfinished:
        while pending and rng.random() < 0.5:
            requests.append(pending.pop(0))
            scheduler.add(requests[-1])
        abort_one()
        if rng.random() < 0.02:
            scheduler.cache.clear()
        if scheduler.has_unfinished:
            fails, fails_ahead = rng.random() < failing, rng.random() < failing
            before = len(simulation.finished)
            known_to_fail = simulation.flight is not None and simulation.flight.failed
            simulation.step(fail=fails, ahead=ahead and rng.random() < 0.9, fail_ahead=fails_ahead)
            if fails or known_to_fail:
                cut_short.update(simulation.finished[before:])
    return Outcome(requests, cut_short, simulation)
