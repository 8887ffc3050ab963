"""Values of single config keys that fit, each accepted by the planner: what to change, how far to go.

`suggest_changes` finds the mildest value of one key with which an engine fits; the rest finds the largest
values that a plan could have.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from minivllm_engine.core.config import EngineConfig
from minivllm_engine.memory.fit import Fit, Planner, largest
from minivllm_engine.memory.layout import SHORTEST_SEQUENCE, MemoryPlan

MIB = 2**20
LENGTHS = tuple(1024 * n for n in (4, 8, 16, 32, 64, 128))
SEQUENCES = (16, 32, 64, 128, 256)
_MOST_SEQUENCES = 1 << 20
_MOST = 3  # suggestions
_MOST_PERCENT = 98  # of a GPU that is worth proposing
# Set too large, they are the first to blame: key -> (least value, unit, its name).
_SIZES = {
    "engine.max_num_seqs": (1, 1, ""),
    "engine.max_model_len": (SHORTEST_SEQUENCE, 1, ""),
    "cache.snapshot_memory": (0, MIB, "MiB"),
    "cache.num_blocks": (1, 1, ""),
}

Verdict = Literal["ok", "KV", "state", "both"]
Pool = Literal["kv", "state", "snapshots"]


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


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest value of a setting, 0 where there is none, and the pool that has no room for one more.

    `bound_by` is None where no pool is what ends it.
    """

    value: int
    bound_by: Pool | None


@dataclass(frozen=True, slots=True)
class Cell:
    """Whether so many slots and one sequence of that length fit together, and which pool is too small.

    Attributes:
        full_length_requests: of that length, at once; 0 where it does not fit.
        is_current: the values of the plan in force.
    """

    max_num_seqs: int
    max_model_len: int
    verdict: Verdict
    full_length_requests: int
    is_current: bool


def with_engine(config: EngineConfig, **values: Any) -> EngineConfig:
    """Return `config` with some keys of its section `engine` set."""
    return config.model_copy(update={"engine": config.engine.model_copy(update=values)})


def refused_above(config: EngineConfig, planner: Planner) -> Limit:
    """Find the largest `max_num_seqs` that the planner accepts, whatever defaults it lowers for it."""
    return _most_sequences(config, planner, lambda count, other: other.ok)


def unlowered_max_num_seqs(config: EngineConfig, result: Fit, planner: Planner) -> Limit:
    """Find how many sequences of a KV block each fit beside one of the plan's length and its snapshots.

    Args:
        result: of planning `config`.
    """

    def fits(count: int, other: Fit) -> bool:
        return _has_blocks(other, count) and _as_good(other, result)

    base = with_engine(config, max_model_len=result.plan.max_model_len)
    return _most_sequences(base, planner, fits)


def _most_sequences(
    config: EngineConfig, planner: Planner, fits: Callable[[int, Fit], bool]
) -> Limit:
    def ask(count: int) -> Fit:
        return planner(with_engine(config, max_num_seqs=count))

    most = largest(lambda count: fits(count, ask(count)), _MOST_SEQUENCES) or 0
    if most == _MOST_SEQUENCES:
        return Limit(most, None)
    too_many = ask(most + 1)
    if too_many.ok:
        return Limit(most, "snapshots" if _has_blocks(too_many, most + 1) else "kv")
    cache = config.cache.model_copy(update={"num_blocks": None})
    shortest = with_engine(config, max_num_seqs=most + 1, max_model_len=SHORTEST_SEQUENCE)
    fits_short = planner(shortest.model_copy(update={"cache": cache})).ok
    return Limit(most, "kv" if fits_short else "state")


def _has_blocks(result: Fit, count: int) -> bool:
    return not result.plan.block_bytes or result.plan.num_blocks >= count


def largest_max_model_len(
    config: EngineConfig, result: Fit, planner: Planner, *, positions: int
) -> int:
    """Find the longest sequence, at most `positions`, that fits beside the plan's slots and snapshots."""
    base = with_engine(config, max_num_seqs=result.plan.max_num_seqs)

    def fits(length: int) -> bool:
        return _as_good(planner(with_engine(base, max_model_len=length)), result)

    return largest(fits, positions, SHORTEST_SEQUENCE) or 0


def _as_good(other: Fit, result: Fit) -> bool:
    """Does it fit, with the snapshots that are due by default unless `result` has not got them either?"""
    return other.ok and (_lowers_snapshots(result) or not _lowers_snapshots(other))


def _lowers_snapshots(result: Fit) -> bool:
    return any(lowered.key == "cache.snapshot_memory" for lowered in result.lowered)


def what_fits(
    config: EngineConfig, plan: MemoryPlan, planner: Planner, *, positions: int
) -> list[Cell]:
    """List cells by `max_num_seqs`, then by `max_model_len`; the plan's own values are among them."""
    lengths = sorted({n for n in LENGTHS if n <= positions} | {plan.max_model_len})
    counts = sorted({*SEQUENCES, plan.max_num_seqs})
    return [_cell(config, plan, planner, count, length) for count in counts for length in lengths]


def _cell(
    config: EngineConfig, plan: MemoryPlan, planner: Planner, count: int, length: int
) -> Cell:
    def ask(num_seqs: int, max_model_len: int) -> Fit:
        return planner(with_engine(config, max_num_seqs=num_seqs, max_model_len=max_model_len))

    result = ask(count, length)
    current = (count, length) == (plan.max_num_seqs, plan.max_model_len)
    if result.ok:
        return Cell(count, length, "ok", result.plan.full_length_requests, current)
    verdict: Verdict = "KV"
    if not ask(count, SHORTEST_SEQUENCE).ok:
        verdict = "state" if ask(1, length).ok else "both"
    return Cell(count, length, verdict, 0, current)
