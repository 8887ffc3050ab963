"""Requests that wait for another one to compute the beginning that their prompts share."""

from collections.abc import Iterable

from minivllm_engine.cache.prefix_cache import Match, PrefixCache
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
        """Is the leader of `request` still on the way?"""
        leader, boundary = self._leaders.get(request, (None, 0))
        if leader is None:
            return False
        if leader.status == "running" and leader.num_computed_tokens < boundary:
            return True
        del self._leaders[request]
        return False

    def find_leader(self, request: Request, match: Match, running: Iterable[Request]) -> bool:
        """Will one of `running` soon get to a later boundary than `match` has? Then wait for it."""
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
