"""Remedies about memory: each is asked of the planner before it is offered."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm_cli import engine
from minivllm_cli.batch.tally import Tally
from minivllm_cli.config.settings import Settings
from minivllm_cli.config.typed_options import option
from minivllm_engine.core.errors import EngineError

if TYPE_CHECKING:
    from minivllm_engine.memory.devices import DeviceMemory
    from minivllm_engine.memory.layout import MemoryPlan

_STEP = 1024
_OFTEN = 0.5
_MANY_MISSES = 0.2
_MOST_OF = 0.9
_FINEST_INTERVAL = 64


class Remedies:
    """What would help, for one model and one configuration.

    Args:
        device: as it was before the engine was on it; None where none is.
    """

    def __init__(
        self, settings: Settings, model_path: Path, device: "DeviceMemory | None" = None
    ) -> None:
        self._settings = settings
        self._model_path, self._device = model_path, device
        self._plan = lru_cache(maxsize=64)(self._ask)

    def for_long_prompt(self, num_tokens: int) -> str:
        """Say what to do about a prompt of that many tokens, which is too long."""
        wanted = -(-(num_tokens + 1) // _STEP) * _STEP
        if self._plan("engine.max_model_len", wanted):
            longer = option(self._settings, "engine.max_model_len", wanted)
            return f"{longer} (fits) or --truncate middle"
        return "--truncate middle"

    def advice(self, tally: Tally) -> str | None:
        """Return the one thing that would help most with a load like this, if something would."""
        return self.for_cache(tally) or self.for_waiting(tally)

    def for_waiting(self, tally: Tally) -> str | None:
        """Say what would have let more requests run at once, if that was what most steps lacked."""
        shares = tally.summary()["limited_by"]
        share = shares.get("state slots", 0.0)
        if share <= _OFTEN or tally.stats is None:
            return None
        doubled = 2 * tally.stats.state_slots_total
        if not self._plan("engine.max_num_seqs", doubled):
            return None
        more = option(self._settings, "engine.max_num_seqs", doubled, flag="--max-num-seqs")
        return f"state slots held requests back in {share:.0%} of the steps; {more} fits"

    def for_cache(self, tally: Tally) -> str | None:
        """Say what would have let more prompts reuse what was computed before, if many could not."""
        stats, misses = tally.stats, tally.misses
        if stats is None or not tally.num_run:
            return None
        lost = misses["evicted"] + misses["no_snapshot"]
        if lost >= _MANY_MISSES * tally.num_run:
            text = f"{lost:,} of {tally.num_run:,} prompts found their beginning given up"
            if stats.snapshots_evicted:
                return self._with_more_snapshots(text)
            return self._with_more_blocks(text) if stats.blocks_evicted else None
        short = misses["below_granularity"]
        if short > _OFTEN * tally.num_run:
            return self._with_finer_blocks(f"{short:,} of {tally.num_run:,} prompts are too short")
        return None

    def _with_more_snapshots(self, text: str) -> str | None:
        plan = self._plan(None, None)
        if plan is None:
            return None
        doubled = -(-2 * plan.num_snapshots * plan.slot_bytes // 2**20)
        other = self._with("cache.snapshot_memory", f"{doubled}MiB", plan)
        if other is None or other.num_snapshots <= plan.num_snapshots:
            return None
        return f"{text}; --set cache.snapshot_memory={doubled}MiB fits"

    def _with_more_blocks(self, text: str) -> str | None:
        plan = self._plan(None, None)
        if plan is None or not self._with("cache.num_blocks", 2 * plan.num_blocks, plan):
            return None
        return f"{text}; --set cache.num_blocks={2 * plan.num_blocks} fits"

    def _with_finer_blocks(self, text: str) -> str | None:
        block_size = int(self._settings.get("cache.block_size"))
        interval = lcm(block_size, _FINEST_INTERVAL)
        if interval == _FINEST_INTERVAL or not self._plan("cache.block_size", _FINEST_INTERVAL):
            return None
        return (
            f"{text} to be reused in units of {interval} tokens; "
            f"--set cache.block_size={_FINEST_INTERVAL} fits"
        )

    def _with(self, path: str, value: Any, plan: "MemoryPlan") -> "MemoryPlan | None":
        """The plan with one value more; None where that does not fit, or takes much from the rest."""
        other = self._plan(path, value)
        sizes = ("max_num_seqs", "max_model_len", "num_snapshots")
        if other is None or any(getattr(other, s) < getattr(plan, s) for s in sizes):
            return None
        # What nothing else wants goes to KV blocks, so these always give a little.
        return other if other.num_blocks >= _MOST_OF * plan.num_blocks else None

    def _ask(self, path: str | None, value: Any) -> "MemoryPlan | None":
        settings = self._settings if path is None else self._settings.with_value(path, value)
        try:
            with _without_warnings():
                return engine.plan_memory(settings, self._model_path, self._device)
        except EngineError:
            return None


@contextmanager
def _without_warnings() -> Iterator[None]:
    # The planner warns of what it lowers; here it is only asked what would be.
    logger = logging.getLogger("minivllm_engine")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
