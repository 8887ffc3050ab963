"""Which requests hold blocks and a slot: they are admitted by arrival, and the youngest is preempted."""

from collections.abc import Iterable, Iterator

from minivllm_engine.cache.prefix_cache import Match, PrefixCache
from minivllm_engine.core.outputs import CacheUse
from minivllm_engine.core.request import Request


class SharedPrefixes:
    """Which waiting request has whom to wait for, and up to which boundary.

    The one waited for, the leader, is running and in its prompt; it leaves a snapshot at the boundary.
    A leader that ends or is preempted before it gets there holds nobody up.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._leaders: dict[Request, tuple[Request, int]] = {}

    def must_wait(self, request: Request) -> bool:
        """Say whether the leader of `request` is still on the way."""
        leader, boundary = self._leaders.get(request, (None, 0))
        if leader is None:
            return False
        if leader.status == "running" and leader.num_computed_tokens < boundary:
            return True
        del self._leaders[request]
        return False

    def find_leader(self, request: Request, match: Match, running: Iterable[Request]) -> bool:
        """Say whether one of `running` soon reaches a later boundary than `match` has."""
        if match.use.miss_reason in ("disabled", "below_granularity", None):
            return False
        best, leader = match.start, None
        blocks = self._cache.interval // self._cache.blocks.block_size
        beginning = self._cache.hashes(request, blocks)[-1]
        for other in running:
            done = other.num_computed_tokens
            if done >= len(other.prompt_ids) - 1 or not other.params.prefix_cache:
                continue
            if other.block_hashes[blocks - 1 : blocks] != [beginning]:
                continue
            boundary = self._cache.shared_boundary(request, other)
            if boundary <= other.num_launched_tokens:
                # A step in flight goes there: only the snapshots that it leaves anyway can be had.
                boundary = max((b for b in other.boundaries if b <= boundary), default=0)
            if boundary > max(best, done):
                best, leader = boundary, other
        if leader is None:
            return False
        if best not in leader.boundaries:
            leader.boundaries = sorted([*leader.boundaries, best])
        self._leaders[request] = (leader, best)
        return True

    def forget(self, request: Request) -> None:
        """`request` has ended."""
        self._leaders.pop(request, None)


class Admission:
    """Owns the two queues: `waiting` requests hold nothing, `running` ones hold blocks and a slot.

    Requests are admitted by arrival, where there is a slot and room for all their tokens. One whose
    prompt begins like one that is being computed waits until it can start from there. Who is preempted
    gives up blocks and slot and later starts again from its known tokens, or from what the prefix cache
    still has of them. The oldest is never preempted, so that something always finishes.

    Attributes:
        waiting, running: by arrival.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache, self._blocks, self._states = cache, cache.blocks, cache.states
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._restores: dict[Request, int] = {}
        self._shared_prefixes = SharedPrefixes(cache)

    def live_requests(self) -> Iterator[Request]:
        """Return all requests that have not ended, running ones first."""
        yield from self.running
        yield from self.waiting

    # -- coming ----------------------------------------------------------------------------------

    def admit_in_order(self) -> str | None:
        """Let waiting requests run. Returns what the next one is short of, if anything."""
        # By arrival: a request that needs much memory is not overtaken for ever by small ones. Admitted
        # prompts then share the token budget, so that a long one holds nobody up. Only those that wait
        # for the beginning of their prompt are passed over.
        for request in self.waiting[:]:
            if not self._states.num_free:
                return "state slots"
            if self._shared_prefixes.must_wait(request):
                continue
            match = self._cache.match(request)
            if self._shared_prefixes.find_leader(request, match, self.running):
                continue
            shortage = self._shortage(request, match)
            if shortage is not None:
                return shortage
            self._admit(request, match)
        return None

    def admit_alone(self, request: Request) -> None:
        """Let a waiting request run, from nothing, whoever must make room for it."""
        # What the cache has may be what made it fail.
        cold = Match((), 0, CacheUse(miss_reason="disabled"))
        while self._shortage(request, cold) and self.preempt_for(request, any_age=True):
            continue
        self._admit(request, cold)

    def take_restores(self) -> dict[Request, int]:
        """Take the snapshots that admitted requests start from. The next step restores them."""
        restores, self._restores = self._restores, {}
        return restores

    def _shortage(self, request: Request, match: Match) -> str | None:
        """Is there a slot, and room for all its tokens beside what running prompts still need?"""
        if self._states.num_free == 0:
            return "state slots"
        blocks = self._blocks
        promised = sum(
            blocks.blocks_for(_wanted_tokens(r)) - len(r.block_table)
            for r in self.running
            if remaining(r) > 1
        )
        # Every running request grows by a block now and then: admitting into the last free blocks
        # would mean preempting the newcomer soon after.
        headroom = min(len(self.running), blocks.num_blocks // 16)
        shared = sum(not blocks.is_idle(n.block) for n in match.held(blocks.block_size))
        needed = blocks.blocks_for(_wanted_tokens(request)) - shared
        return "KV blocks" if needed + promised + headroom > blocks.num_available else None

    def _admit(self, request: Request, match: Match) -> None:
        self.waiting.remove(request)
        snapshot = self._cache.start_from(request, match)
        request.num_launched_tokens = request.num_computed_tokens
        request.slot = self._states.allocate()
        if snapshot is not None:
            self._restores[request] = snapshot
        request.status = "running"
        _insert_by_arrival(self.running, request)

    # -- going -----------------------------------------------------------------------------------

    def preempt_for(self, request: Request, *, any_age: bool = False) -> Request | None:
        """Preempt the youngest running request, if it is younger than `request` or `any_age` will do.

        Nothing of it may be in flight. None where there is no such request.
        """
        others = [r for r in self.running if r is not request]
        if not others or (others[-1].arrival < request.arrival and not any_age):
            return None
        youngest = others[-1]
        self.stop(youngest)
        youngest.num_preemptions += 1
        self.num_preemptions += 1
        return youngest

    def stop(self, request: Request) -> None:
        """Let a running request wait again: state and KV are dropped, the tokens stay."""
        self.running.remove(request)
        self.release(request)
        self._restores.pop(request, None)
        request.num_computed_tokens = request.num_launched_tokens = request.num_awaited = 0
        request.status = "waiting"
        _insert_by_arrival(self.waiting, request)

    def end(self, request: Request) -> None:
        """Take a request out of its queue. What steps in flight use must be released when they land."""
        if request.status == "waiting":
            self.waiting.remove(request)
        elif request.status == "running":
            self.running.remove(request)
            self._restores.pop(request, None)
            if request.num_launched_tokens == request.num_computed_tokens:
                self.release(request)
        request.status = "finished"
        self._shared_prefixes.forget(request)

    def release(self, request: Request) -> None:
        """Give up its blocks and its slot."""
        assert request.slot is not None
        self._blocks.release(request.block_table)
        self._states.release(request.slot)
        request.block_table, request.slot = [], None
        request.boundaries, request.num_kept_blocks = [], 0


def _wanted_tokens(request: Request) -> int:
    """The known tokens, and the next one where there will be one: a score may fill the context."""
    return request.num_tokens + (not request.targets)


def remaining(request: Request) -> int:
    """Return tokens that no step has taken yet, the awaited one too; 0 where that one will be the last."""
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
