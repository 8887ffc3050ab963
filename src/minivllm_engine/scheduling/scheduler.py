"""Which requests run in the next step, and what becomes of a step: plain Python over integers, no tensors."""

from collections.abc import Iterator, Sequence

from minivllm_engine.cache.prefix_cache import PrefixCache
from minivllm_engine.core.request import Request
from minivllm_engine.scheduling.admission import Admission
from minivllm_engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledSequence
from minivllm_engine.scheduling.token_budget import TokenBudget


class Scheduler:
    """Owns the tokens, status and progress of all requests, and decides what runs.

    `Admission` says who may run, `TokenBudget` how far each gets in a step; here a step is made of that,
    and here it ends: committed, or rolled back.

    A step may be scheduled while the one before is still in flight. Its requests are then taken to be
    where that step will leave them, each with a token more that nobody knows yet.
    """

    def __init__(self, cache: PrefixCache, *, max_num_batched_tokens: int) -> None:
        self.cache = cache
        self.block_manager = cache.blocks
        self.state_manager = cache.states
        self.max_num_batched_tokens = max_num_batched_tokens
        self.interval = cache.interval
        self.num_steps = 0
        self.bound_by: str | None = None
        self._admission = Admission(cache)
        self._in_flight: list[ScheduledBatch] = []  # in the order of their launch
        self._quarantine: list[Request] = []
        self._num_turns = 0

    @property
    def waiting(self) -> list[Request]:
        """By arrival."""
        return self._admission.waiting

    @property
    def running(self) -> list[Request]:
        """By arrival."""
        return self._admission.running

    @property
    def num_preemptions(self) -> int:
        return self._admission.num_preemptions

    def live_requests(self) -> Iterator[Request]:
        """Return all requests that are not finished, running ones first."""
        return self._admission.live_requests()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a new request. Its `max_total_tokens` fits the pool: see `fits`."""
        assert self.fits(request.max_total_tokens)
        self._admission.waiting.append(request)

    def fits(self, num_tokens: int) -> bool:
        """Say whether a request of that many tokens could finish, were it alone."""
        return self.block_manager.blocks_for(num_tokens) <= self.block_manager.num_blocks

    def schedule(self) -> ScheduledBatch:
        """Plan the next step, with none in flight. Empty only where nothing is left to run.

        Allocates blocks and slots and may preempt; tokens and progress change in `commit` alone.
        The batch is valid until `commit` or `roll_back`, one of which must follow.
        """
        assert not self._in_flight, "the step before was neither committed nor rolled back"
        if not self._quarantine:
            return self._launch(self._share_step())
        self.num_steps += 1
        request = self._quarantine[0]
        if request.status == "waiting":
            self._admission.admit_alone(request)
        step = self._budget(may_preempt=True)
        step.give_alone(request)
        self.bound_by = step.bound_by
        return self._launch(step)

    def schedule_ahead(self) -> ScheduledBatch | None:
        """Plan the step after the one in flight. None where that must land first.

        That is where nothing can run before, where memory is short, since nothing that is in flight may be
        preempted, and where a request is looked for that makes steps fail.
        """
        assert len(self._in_flight) == 1
        if self._quarantine:
            return None
        step = self._share_step()
        if step.starved or not step.lengths:
            # What was allocated and admitted is kept for the next attempt.
            self.num_steps -= 1
            return None
        return self._launch(step)

    def _share_step(self) -> TokenBudget:
        self.num_steps += 1
        step = self._budget(may_preempt=not self._in_flight)
        step.bound_by = self._admission.admit_in_order()
        step.share(self.num_steps)
        self.bound_by = step.bound_by
        return step

    def _budget(self, *, may_preempt: bool) -> TokenBudget:
        return TokenBudget(
            self.cache, self._admission, self.max_num_batched_tokens, may_preempt=may_preempt
        )

    def _launch(self, step: TokenBudget) -> ScheduledBatch:
        for request in step.lengths:
            self._num_turns += 1
            request.last_turn = self._num_turns
        sequences = [self._sequence(request, length) for request, length in step.lengths.items()]
        # By slot, so that a decode step walks through the state memory in order.
        sequences.sort(key=lambda s: (s.length > 1, s.slot))
        for sequence in sequences:
            sequence.request.num_launched_tokens += sequence.length
            sequence.request.num_awaited += sequence.samples
        restores = self._admission.take_restores()
        batch = ScheduledBatch(
            tuple(sequences),
            num_decodes=sum(s.length == 1 for s in sequences),
            restores=tuple((snapshot, _slot(request)) for request, snapshot in restores.items()),
            restored=tuple(restores),
        )
        self._in_flight.append(batch)
        return batch

    def _sequence(self, request: Request, length: int) -> ScheduledSequence:
        start = request.num_launched_tokens
        samples = not request.targets and start + length == request.num_tokens + request.num_awaited
        table, end = tuple(request.block_table), start + length
        snapshot = None
        if end in request.boundaries or (
            end >= len(request.prompt_ids) and end % self.interval == 0
        ):
            snapshot = self.cache.reserve_snapshot(request, end)
        return ScheduledSequence(
            request,
            start,
            length,
            table,
            _slot(request),
            samples,
            snapshot,
            request.scored_range(start, end),
            awaits=start + length > request.num_tokens,
        )

    def commit(self, batch: ScheduledBatch, token_ids: Sequence[int | None]) -> None:
        """Commit the oldest step in flight: lengths advance, and what sampled gets its token.

        Args:
            token_ids: one entry a sequence; None where the sequence does not sample or got no token.
        """
        for sequence, token_id in zip(batch.sequences, token_ids, strict=True):
            request = sequence.request
            if request.status == "finished":
                self._discard(sequence)
                continue
            end = sequence.start + sequence.length
            request.num_computed_tokens = end
            self.cache.commit(request, end, sequence.snapshot)
            if sequence.samples:
                request.num_awaited -= 1
                if token_id is not None:
                    request.output_ids.append(token_id)
                if request in self._quarantine:
                    self._quarantine.remove(request)
        self._land(batch)

    def roll_back(self, batch: ScheduledBatch, *, suspect: bool = True) -> list[Request]:
        """Undo the oldest step in flight, which failed: what it wrote is unknown. Tokens stay; state and KV
        are dropped, those of a step that was launched after it too.

        The requests of the steps start again. If one of them is suspected of having caused the failure,
        they run one at a time until each has got a token alone. Returns those that have failed
        alone: they are to blame and must be finished.
        """
        assert batch is self._in_flight[0]
        steps = list(self._in_flight)
        for sequence in (sequence for step in steps for sequence in step.sequences):
            self._discard(sequence)
        for step in steps:
            self._land(step)
        ran = list(dict.fromkeys(s.request for step in steps for s in step.sequences))
        # What was to be restored for a request that had no tokens in the step may not have been, either.
        restored = [r for step in steps for r in step.restored if r not in ran]
        for request in [*ran, *restored]:
            if request.status == "running":
                self._admission.stop(request)
        if not suspect:
            return []
        if len(ran) == 1:
            return ran
        self._quarantine += [r for r in ran if r.status == "waiting"]
        return []

    def roll_back_all(self) -> None:
        """Give up whatever is in flight, without suspecting anybody."""
        if self._in_flight:
            self.roll_back(self._in_flight[0], suspect=False)

    def finish(self, request: Request) -> None:
        """End a request, whatever it is doing. Blocks and slot of steps in flight go when they land."""
        self._admission.end(request)
        if request in self._quarantine:
            self._quarantine.remove(request)

    def _discard(self, sequence: ScheduledSequence) -> None:
        """Nobody will use what this part of a step has written."""
        if sequence.snapshot is not None:
            self.state_manager.free_snapshot(sequence.snapshot)

    def _land(self, batch: ScheduledBatch) -> None:
        self._in_flight.remove(batch)
        ended = [s.request for s in batch.sequences if s.request.status == "finished"]
        if ended:
            flying = {s.request for step in self._in_flight for s in step.sequences}
            for request in ended:
                if request not in flying:
                    self._admission.release(request)

    def check_integrity(self) -> None:
        """Prove ownership: every block and slot is free, or held by exactly the requests that use it."""
        flying = [s for batch in self._in_flight for s in batch.sequences]
        ending = {s.request for s in flying if s.request.status == "finished"}
        holders = [*self.running, *ending]
        self.block_manager.check_integrity(request.block_table for request in holders)
        slots = [request.slot for request in holders]
        assert None not in slots, "a running request has no slot"
        self.state_manager.check_integrity(
            (slot for slot in slots if slot is not None),
            (s.snapshot for s in flying if s.snapshot is not None),
        )
        self.cache.check_integrity(holders)
        for request in self.running:
            held = len(request.block_table) * self.block_manager.block_size
            assert held >= request.num_launched_tokens, "computed tokens without blocks"
            assert request.num_computed_tokens <= request.num_tokens
            steps = [s for s in flying if s.request is request]
            length, samples = sum(s.length for s in steps), sum(s.samples for s in steps)
            assert request.num_launched_tokens == request.num_computed_tokens + length
            assert request.num_awaited == samples
        for request in self.waiting:
            assert request.status == "waiting" and not request.block_table
            assert request.slot is None and request.num_computed_tokens == 0
            assert request.num_launched_tokens == request.num_awaited == 0
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=lambda r: r.arrival), "a queue is out of order"


def _slot(request: Request) -> int:
    assert request.slot is not None, "a request runs without a slot"
    return request.slot
