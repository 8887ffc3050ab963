"""Which requests run in the next step, and how far: plain Python over integers, no tensors."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minivllm_engine.prefix_cache import Match, PrefixCache
from minivllm_engine.request import CacheUse, Request
from minivllm_engine.shared_beginnings import SharedBeginnings


class ScheduledSequence(NamedTuple):
    """One request's part of a step: its tokens `start` to `start + length`.

    `samples` says that the last token is among them, so that the step yields the next one.
    `awaits` says that its token, a single one, is still to come from the step before.
    `snapshot` is where its state goes after the step, if it is to be kept. `scored` are the positions
    whose logits are wanted because they tell the logprob of the prompt's next token.
    """

    request: Request
    start: int
    length: int
    block_table: tuple[int, ...]
    slot: int
    samples: bool
    snapshot: int | None = None
    scored: range = range(0)
    awaits: bool = False


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """A step: the first `num_decodes` sequences have one token each, longer chunks follow.

    Before it, the states of `restores` (snapshot, slot) are copied, for the requests `restored`, which may
    run in a later step only.
    """

    sequences: tuple[ScheduledSequence, ...]
    num_decodes: int
    restores: tuple[tuple[int, int], ...] = ()
    restored: tuple[Request, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(sequence.length for sequence in self.sequences)


class Scheduler:
    """Owns the tokens, status and progress of all requests, and decides what runs.

    A step has a budget of tokens. Running requests with one token to go (decodes) come first, but
    leave a quarter of a scarce budget to prompts. What prompts get is shared between the oldest one
    and the shortest ones, so that neither starves. Requests are admitted by arrival. When blocks run
    out, the youngest running request is preempted: it gives up blocks and slot and later starts again
    from its known tokens, or from what the prefix cache still has of them. The oldest is never
    preempted, so that something always finishes. A request whose prompt begins like one that is being
    computed waits until it can start from there.

    A step may be scheduled while the one before is still in flight. Its requests are then taken to be
    where that step will leave them, each with a token more that nobody knows yet.
    """

    def __init__(self, cache: PrefixCache, *, max_num_batched_tokens: int) -> None:
        self.cache = cache
        self.block_manager = cache.blocks
        self.state_manager = cache.states
        self.max_num_batched_tokens = max_num_batched_tokens
        self.grid = cache.grid
        self.waiting: list[Request] = []  # by arrival
        self.running: list[Request] = []  # by arrival
        self.num_steps = 0
        self.num_preemptions = 0
        self.bound_by: str | None = None
        self._in_flight: list[ScheduledBatch] = []  # in the order of their launch
        self._quarantine: list[Request] = []
        self._plan: dict[Request, int] = {}
        self._num_planned = self._num_turns = 0
        self._starved = False
        self._restores: dict[Request, int] = {}
        self._beginnings = SharedBeginnings(cache)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a new request. Its `max_total_tokens` fits the pool: see `fits`."""
        assert self.fits(request.max_total_tokens)
        self.waiting.append(request)

    def fits(self, num_tokens: int) -> bool:
        """Can a request of that many tokens finish, were it alone?"""
        return self.block_manager.blocks_for(num_tokens) <= self.block_manager.num_blocks

    def schedule(self) -> ScheduledBatch:
        """Plan the next step, with none in flight. Empty only where nothing is left to run.

        Allocates blocks and slots and may preempt; tokens and progress change in `commit` alone.
        The batch is valid until `commit` or `roll_back`, one of which must follow.
        """
        assert not self._in_flight, "the step before was neither committed nor rolled back"
        self._begin_step()
        if self._quarantine:
            self._schedule_alone(self._quarantine[0])
        else:
            self._schedule_all()
        return self._launch()

    def schedule_ahead(self) -> ScheduledBatch | None:
        """Plan the step after the one in flight. None where that must land first.

        That is where nothing can run before, where memory is short, since nothing that is in flight may be
        preempted, and where a request is looked for that makes steps fail.
        """
        assert len(self._in_flight) == 1
        if self._quarantine:
            return None
        self._begin_step()
        self._schedule_all()
        if self._starved or not self._plan:
            # What was allocated and admitted is kept for the next attempt.
            self.num_steps -= 1
            return None
        return self._launch()

    def _begin_step(self) -> None:
        self.num_steps += 1
        self.bound_by = None
        self._plan, self._num_planned, self._starved = {}, 0, False

    def _launch(self) -> ScheduledBatch:
        for request in self._plan:
            self._num_turns += 1
            request.last_turn = self._num_turns
        sequences = [self._sequence(request, length) for request, length in self._plan.items()]
        # By slot, so that a decode step walks through the state memory in order.
        sequences.sort(key=lambda s: (s.length > 1, s.slot))
        for sequence in sequences:
            sequence.request.num_launched_tokens += sequence.length
            sequence.request.num_awaited += sequence.samples
        restored = tuple(r for r in self._restores if r.slot is not None)
        restores = [(self._restores[r], r.slot) for r in restored if r.slot is not None]
        self._restores = {}
        num_decodes = sum(s.length == 1 for s in sequences)
        batch = ScheduledBatch(tuple(sequences), num_decodes, tuple(restores), restored)
        self._in_flight.append(batch)
        return batch

    def commit(self, batch: ScheduledBatch, token_ids: Sequence[int | None]) -> None:
        """The oldest step in flight is done: lengths advance, and what sampled gets its token.

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
        """The oldest step in flight failed, and what it wrote is unknown. Tokens stay; state and KV are
        dropped, those of a step that was launched after it too.

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
                self._stop_running(request)
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
        if request.status == "waiting":
            self.waiting.remove(request)
        elif request.status == "running":
            self.running.remove(request)
            self._restores.pop(request, None)
            if request.num_launched_tokens == request.num_computed_tokens:
                self._release(request)
        request.status = "finished"
        self._beginnings.forget(request)
        if request in self._quarantine:
            self._quarantine.remove(request)

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

    # -- planning a step -------------------------------------------------------------------------

    def _schedule_alone(self, request: Request) -> None:
        if request.status == "waiting":
            # From nothing: what the cache has may be what made it fail.
            cold = Match((), 0, CacheUse(miss_reason="disabled"))
            while not self._can_admit(request, cold) and self._preempt_for(request):
                continue
            self._admit(request, cold)
        self._plan_tokens(request, self.max_num_batched_tokens)

    def _schedule_all(self) -> None:
        budget = self.max_num_batched_tokens
        self._admit_in_order()
        decodes: list[Request] = []
        prompts: list[Request] = []
        for request in self.running:
            left = _remaining(request)
            if left:
                (decodes if left == 1 else prompts).append(request)
        limit = budget - (self._prompt_share(budget) if prompts else 0)
        if len(decodes) > limit:
            decodes.sort(key=lambda r: r.last_turn)
        self._plan_decodes(decodes, limit)
        if prompts:
            self._plan_prompts(prompts, budget)
            self._plan_decodes(decodes, budget)
        full = self._num_planned >= budget and self.bound_by is None
        if full and any(_remaining(r) > self._plan.get(r, 0) for r in self.running):
            self.bound_by = "token budget"

    def _prompt_share(self, budget: int) -> int:
        # A budget of one token cannot be shared within a step: steps take turns.
        return self.num_steps % 2 if budget == 1 else max(1, budget // 4)

    def _plan_decodes(self, decodes: Iterable[Request], limit: int) -> None:
        for request in decodes:
            if self._num_planned >= limit:
                return
            if request.status == "running" and request not in self._plan:
                self._plan_tokens(request, 1)

    def _plan_prompts(self, prompts: Sequence[Request], limit: int) -> None:
        """Half of what is left of the step for the shortest prompts, the rest for the oldest one."""
        prompts = [r for r in prompts if r.status == "running"]
        if not prompts:
            return
        oldest, *others = prompts
        others.sort(key=lambda r: (_remaining(r), r.arrival))
        half = self._num_planned + (limit - self._num_planned) // 2
        for requests, up_to in ((others, half), ((oldest,), limit), (others, limit)):
            for request in requests:
                if self._num_planned >= up_to:
                    break
                if request.status == "running":
                    self._plan_tokens(request, up_to - self._num_planned)

    def _plan_tokens(self, request: Request, available: int) -> None:
        """Give the request up to `available` more tokens of this step, if blocks for them can be had."""
        planned = self._plan.get(request, 0)
        length = self._chunk_length(request, planned + available)
        needed = self.block_manager.blocks_for(request.num_launched_tokens + length)
        missing = needed - len(request.block_table)
        while missing > self.block_manager.num_available:
            if self._in_flight or not self._preempt_for(request):
                self.bound_by, self._starved = "KV blocks", True
                return
        if missing > 0:
            request.block_table += self.cache.allocate(missing)
        self._plan[request] = length
        self._num_planned += length - planned

    def _chunk_length(self, request: Request, available: int) -> int:
        """Tokens from the request's position on: to the end or to where a snapshot is wanted, or as far
        as a grid line within reach.
        """
        start = request.num_launched_tokens
        end = start + _remaining(request)
        end = next((b for b in request.boundaries if b > start), end)
        reach = min(end, start + available)
        next_line = (start // self.grid + 1) * self.grid
        if start % self.grid:
            return min(reach, next_line) - start
        if reach < end and reach >= next_line:
            reach -= reach % self.grid
        return reach - start

    def _sequence(self, request: Request, length: int) -> ScheduledSequence:
        assert request.slot is not None
        start = request.num_launched_tokens
        samples = start + length == request.num_tokens + request.num_awaited
        table, end = tuple(request.block_table), start + length
        snapshot = None
        if end in request.boundaries or (end >= len(request.prompt_ids) and end % self.grid == 0):
            snapshot = self.cache.reserve_snapshot(request, end)
        scored = _scored(request, start, end)
        return ScheduledSequence(
            request,
            start,
            length,
            table,
            request.slot,
            samples,
            snapshot,
            scored,
            awaits=start + length > request.num_tokens,
        )

    # -- admission and preemption ----------------------------------------------------------------

    def _admit_in_order(self) -> None:
        # By arrival: a request that needs much memory is not overtaken for ever by small ones. Admitted
        # prompts then share the token budget, so that a long one holds nobody up. Only those that wait
        # for the beginning of their prompt are passed over.
        for request in self.waiting[:]:
            if not self.state_manager.num_free:
                self.bound_by = "state slots"
                return
            if self._beginnings.must_wait(request):
                continue
            match = self.cache.match(request)
            if self._beginnings.find_leader(request, match, self.running):
                continue
            if not self._can_admit(request, match):
                return
            self._admit(request, match)

    def _can_admit(self, request: Request, match: Match) -> bool:
        """Is there a slot, and room for all its tokens beside what running prompts still need?"""
        if self.state_manager.num_free == 0:
            self.bound_by = "state slots"
            return False
        blocks = self.block_manager
        promised = sum(
            blocks.blocks_for(r.num_tokens + 1) - len(r.block_table)
            for r in self.running
            if _remaining(r) > 1
        )
        # Every running request grows by a block now and then: admitting into the last free blocks
        # would mean preempting the newcomer soon after.
        headroom = min(len(self.running), blocks.num_blocks // 16)
        shared = sum(not blocks.is_idle(n.block) for n in match.held(blocks.block_size))
        needed = blocks.blocks_for(request.num_tokens + 1) - shared
        if needed + promised + headroom > blocks.num_available:
            self.bound_by = "KV blocks"
            return False
        return True

    def _admit(self, request: Request, match: Match) -> None:
        self.waiting.remove(request)
        snapshot = self.cache.start_from(request, match)
        request.num_launched_tokens = request.num_computed_tokens
        request.slot = self.state_manager.allocate()
        if snapshot is not None:
            self._restores[request] = snapshot
        request.status = "running"
        _insert_by_arrival(self.running, request)

    def _preempt_for(self, request: Request) -> bool:
        """Preempt the youngest running request, if it is younger than `request`; in quarantine, any."""
        others = [r for r in self.running if r is not request]
        if not others or (others[-1].arrival < request.arrival and not self._quarantine):
            return False
        youngest = others[-1]
        self._num_planned -= self._plan.pop(youngest, 0)
        self._stop_running(youngest)
        youngest.num_preemptions += 1
        self.num_preemptions += 1
        return True

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        self._restores.pop(request, None)
        request.num_computed_tokens = request.num_launched_tokens = request.num_awaited = 0
        request.status = "waiting"
        _insert_by_arrival(self.waiting, request)

    def _release(self, request: Request) -> None:
        assert request.slot is not None
        self.block_manager.release(request.block_table)
        self.state_manager.release(request.slot)
        request.block_table, request.slot = [], None
        request.boundaries, request.num_kept_blocks = [], 0

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
                    self._release(request)

    def live_requests(self) -> Iterator[Request]:
        """All requests that are not finished, running ones first."""
        yield from self.running
        yield from self.waiting


def _scored(request: Request, start: int, end: int) -> range:
    # Outputs of one request share their prompt: the first one scores it. After a preemption the
    # tokens that were scored before are only computed again.
    if request.params.prompt_logprobs is None or request.index:
        return range(0)
    return range(max(start, len(request.prompt_logprobs)), min(end, len(request.prompt_ids) - 1))


def _remaining(request: Request) -> int:
    """Tokens that no step has taken yet, the awaited one too; 0 where that one will be the last."""
    if request.num_awaited and _ends_with(request, request.num_awaited):
        return 0
    return request.num_tokens + request.num_awaited - request.num_launched_tokens


def _ends_with(request: Request, count: int) -> bool:
    """Will so many more tokens end the request, whatever they are?"""
    outputs = len(request.output_ids) + count
    return (
        outputs >= request.params.max_tokens
        or len(request.prompt_ids) + outputs >= request.max_total_tokens
    )


def _insert_by_arrival(queue: list[Request], request: Request) -> None:
    at = len(queue)
    while at and queue[at - 1].arrival > request.arrival:
        at -= 1
    queue.insert(at, request)
