"""One search: the mildest value of a single key with which an engine fits, accepted by the planner itself."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from minivllm_engine.core.config import EngineConfig
from minivllm_engine.memory.fit import Fit, largest
from minivllm_engine.memory.layout import SHORTEST_SEQUENCE

MIB = 2**20
_MOST = 3  # suggestions
_MOST_PERCENT = 98  # of a GPU that is worth proposing
# Set too large, they are the first to blame: key -> (least value, unit, its name).
_SIZES = {
    "engine.max_num_seqs": (1, 1, ""),
    "engine.max_model_len": (SHORTEST_SEQUENCE, 1, ""),
    "cache.snapshot_memory": (0, MIB, "MiB"),
    "cache.num_blocks": (1, 1, ""),
}

Planner = Callable[[EngineConfig], Fit]


@dataclass(frozen=True, slots=True)
class Change:
    """One config key and the value to set it to, as they are written on a command line."""

    key: str
    value: str

    def __str__(self) -> str:
        return f"--set {self.key}={self.value}"


def changed(config: EngineConfig, change: Change) -> EngineConfig:
    """Return `config` with the change, read as `--set` reads it.

    Raises:
        ValueError: the value is not one that its key can have.
    """
    content: dict[str, Any] = config.model_dump(exclude_unset=True)
    section, _, name = change.key.partition(".")
    value = int(change.value) if change.value.isdecimal() else change.value
    content.setdefault(section, {})[name] = value
    return EngineConfig.model_validate(content)


def suggest_changes(config: EngineConfig, planner: Planner) -> tuple[Change, ...]:
    """Find single changes that make `config` fit, at most three; none where no single one helps.

    First keys that were set too large, then more memory, then smaller steps and narrower numbers.
    """
    search = _Search(config, planner)
    return tuple(change for change in search.run() if change is not None)[:_MOST]


class _Search:
    def __init__(self, config: EngineConfig, planner: Planner) -> None:
        self._config, self._planner = config, planner
        self._plan = planner(config).plan

    def run(self) -> Iterator[Change | None]:
        for key in _SIZES:
            if self._value(key) is not None:
                yield self._largest(key)
        length, size = self._config.engine.max_model_len, self._config.cache.block_size
        if length is not None and self._config.cache.num_blocks is not None:
            yield self._first("cache.num_blocks", [str(-(-length // size))])
        yield self._memory()
        steps = [
            str(1 << p) for p in range(16, 5, -1) if 1 << p < self._plan.max_num_batched_tokens
        ]
        yield self._first("engine.max_num_batched_tokens", steps)
        yield self._first("engine.dtype", ["bf16"])
        yield self._first("engine.state_dtype", ["bf16"])

    def _fits(self, key: str, value: str) -> bool:
        return self._planner(changed(self._config, Change(key, value))).ok

    def _value(self, key: str) -> int | None:
        section, _, name = key.partition(".")
        value: int | None = getattr(getattr(self._config, section), name)
        return value

    def _first(self, key: str, values: list[str]) -> Change | None:
        return next((Change(key, value) for value in values if self._fits(key, value)), None)

    def _largest(
        self, key: str, most: int | None = None, least: int | None = None
    ) -> Change | None:
        """The largest value of a key below the one that was set."""
        low, unit, suffix = _SIZES.get(key, (1, MIB, "MiB"))

        def text(count: int) -> str:
            return f"{count}{suffix}" if count else "0"

        most = -(-(self._value(key) or 0) // unit) - 1 if most is None else most
        count = largest(lambda c: self._fits(key, text(c)), most, low if least is None else least)
        return None if count is None else Change(key, text(count))

    def _memory(self) -> Change | None:
        """The least memory for all pools, or the least share of a GPU; less where too much was set."""
        if self._plan.device.kind == "cuda":
            used = int(self._config.engine.gpu_memory_utilization * 100)
            shares = [f"{percent / 100:g}" for percent in range(used + 1, _MOST_PERCENT + 1)]
            return self._first("engine.gpu_memory_utilization", shares)
        # Too little up to some point, enough from there on, too much beyond what is left of the RAM.
        key, low, high = "engine.cpu_memory", 1, self._plan.device.total // MIB
        while low < high:
            middle = (low + high) // 2
            result = self._planner(changed(self._config, Change(key, f"{middle}MiB")))
            if result.ok or result.plan.memory >= result.plan.pool_bytes:
                high = middle
            else:
                low = middle + 1
        asked = (self._config.engine.cpu_memory or 0) // MIB
        return (
            self._largest(key, max(low, asked), low)
            if asked > low
            else self._first(key, [f"{low}MiB"])
        )
