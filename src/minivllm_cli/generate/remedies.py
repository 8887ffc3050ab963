"""Remedies about memory: each is asked of the planner before it is offered."""

from functools import lru_cache
from pathlib import Path

from minivllm_cli import engine_factory
from minivllm_cli.generate.tally import Tally
from minivllm_cli.settings import Settings
from minivllm_engine.errors import EngineError

_STEP = 1024
_OFTEN = 0.5


class Remedies:
    """What would help, for one model and one configuration."""

    def __init__(self, settings: Settings, model_path: Path) -> None:
        self._settings = settings
        self._model_path = model_path
        self._fits = lru_cache(maxsize=64)(self._ask)

    def for_long_prompt(self, num_tokens: int) -> str:
        """What to do about a prompt of that many tokens, which is too long."""
        wanted = -(-(num_tokens + 1) // _STEP) * _STEP
        if self._fits("engine.max_model_len", wanted):
            return f"--set engine.max_model_len={wanted} (fits) or --truncate middle"
        return "--truncate middle"

    def for_waiting(self, tally: Tally) -> str | None:
        """What would have let more requests run at once, if that was what most steps lacked."""
        shares = tally.summary()["limited_by"]
        share = shares.get("state slots", 0.0)
        if share <= _OFTEN or tally.stats is None:
            return None
        doubled = 2 * tally.stats.state_slots_total
        if not self._fits("engine.max_num_seqs", doubled):
            return None
        return f"state slots held requests back in {share:.0%} of the steps; --max-num-seqs {doubled} fits"

    def _ask(self, path: str, value: int) -> bool:
        try:
            engine_factory.plan_memory(self._settings.with_value(path, value), self._model_path)
        except EngineError:
            return False
        return True
