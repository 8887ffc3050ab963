"""A prefix cache for engines without a model: it only remembers prompts, and always has their states."""

from collections.abc import Sequence

from minivllm_engine.core.outputs import CacheUse

GRID = 64


class PrefixMemory:
    """Says of each prompt what a real cache of 64-token blocks could give it."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, ...]] = []

    def find(self, ids: Sequence[int]) -> CacheUse:
        """What earlier prompts left for this one. Changes nothing."""
        best = (len(ids) - 1) // GRID * GRID
        if not best:
            return CacheUse(miss_reason="below_granularity")
        shared = max((_num_common(ids, seen) for seen in self._seen), default=0)
        start = min(shared // GRID * GRID, best)
        return CacheUse(start, start, start, None if start == best else "new_prefix")

    def keep(self, ids: Sequence[int]) -> None:
        self._seen.append(tuple(ids))


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
