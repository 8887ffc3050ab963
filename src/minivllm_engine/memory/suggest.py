"""Values of single config keys that fit: remedies for what does not, and how far a plan could go.

Whatever is suggested here has been accepted by the planner itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from minivllm_engine.core.config import EngineConfig
from minivllm_engine.memory.fit import Fit, Planner, largest
from minivllm_engine.memory.layout import SHORTEST_SEQUENCE, MemoryPlan

MIB = 2**20
LENGTHS = tuple(1024 * n for n in (4, 8, 16, 32, 64, 128))
SEQUENCES = (16, 32, 64, 128, 256)
_MOST_REMEDIES = 3
_MOST_SEQUENCES = 1 << 20
_MOST_PERCENT = 98  # of a GPU that is worth proposing
# Keys that can be set too large, with their unit and the least value that is worth proposing.
_TOO_LARGE = {
    "engine.max_num_seqs": (1, 1),
    "engine.max_model_len": (1, SHORTEST_SEQUENCE),
    "cache.snapshot_memory": (MIB, 0),
    "cache.num_blocks": (1, 1),
}

Verdict = Literal["ok", "KV", "state", "both"]
Pool = Literal["kv", "state", "snapshots"]


@dataclass(frozen=True, slots=True)
class Remedy:
    """A config key and the value to set it to, as they are written on a command line."""

    key: str
    value: str

    def __str__(self) -> str:
        return f"--set {self.key}={self.value}"


def changed(config: EngineConfig, remedy: Remedy) -> EngineConfig:
    """Return `config` with the remedy's value, read as `--set` reads it.

    Raises:
        ValueError: the value is not one that its key can have.
    """
    content: dict[str, Any] = config.model_dump(exclude_unset=True)
    section, _, name = remedy.key.partition(".")
    value = int(remedy.value) if remedy.value.isdecimal() else remedy.value
    content.setdefault(section, {})[name] = value
    return EngineConfig.model_validate(content)


def find_remedies(config: EngineConfig, planner: Planner) -> tuple[Remedy, ...]:
    """Return at most three single keys with values that make `config` fit; empty where none does.

    First what was set too large, then more memory, then less work and narrower numbers.
    """

    def fits(remedy: Remedy) -> bool:
        return planner(changed(config, remedy)).ok

    return tuple(islice(_fitting(config, planner(config).plan, fits), _MOST_REMEDIES))


def _fitting(
    config: EngineConfig, plan: MemoryPlan, fits: Callable[[Remedy], bool]
) -> Iterator[Remedy]:
    """Of each key the best value that fits."""
    for key, (unit, least) in _TOO_LARGE.items():
        asked = _value(config, key)
        if asked is not None and (found := _largest_value(key, asked, unit, least, fits)):
            yield found
    for candidates in _others(config, plan):
        found = next(filter(fits, candidates), None)
        if found is not None:
            yield found


def _value(config: EngineConfig, key: str) -> int | None:
    section, _, name = key.partition(".")
    value: int | None = getattr(getattr(config, section), name)
    return value


def _largest_value(
    key: str, asked: int, unit: int, least: int, fits: Callable[[Remedy], bool]
) -> Remedy | None:
    """The largest value below `asked` that fits, in steps of `unit`."""

    def remedy(count: int) -> Remedy:
        return Remedy(key, f"{count}MiB" if unit == MIB and count else str(count))

    count = largest(lambda count: fits(remedy(count)), -(-asked // unit) - 1, least)
    return None if count is None else remedy(count)


def _others(config: EngineConfig, plan: MemoryPlan) -> Iterator[list[Remedy]]:
    """Values worth trying of the keys that are not simply too large, the best first."""
    length, cache = config.engine.max_model_len, config.cache
    if length is not None and cache.num_blocks is not None:
        yield [Remedy("cache.num_blocks", str(-(-length // cache.block_size)))]
    if plan.device.kind == "cuda":
        first = int(config.engine.gpu_memory_utilization * 100) + 1
        shares = (f"{percent / 100:g}" for percent in range(first, _MOST_PERCENT + 1))
        yield [Remedy("engine.gpu_memory_utilization", share) for share in shares]
    else:
        left = plan.device.total - plan.weight_bytes - plan.activation_bytes
        asked = config.engine.cpu_memory
        sizes = [-(-plan.pool_bytes // MIB)]  # what the least pools take
        if asked is not None and asked > left:
            sizes.insert(0, left // MIB)
        yield [Remedy("engine.cpu_memory", f"{size}MiB") for size in sizes if size > 0]
    tokens = [1 << power for power in range(16, 5, -1) if 1 << power < plan.max_num_batched_tokens]
    yield [Remedy("engine.max_num_batched_tokens", str(count)) for count in tokens]
    yield [Remedy("engine.dtype", "bf16")]
    yield [Remedy("engine.state_dtype", "bf16")]


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
    """`config` with some keys of its section `engine` set."""
    return config.model_copy(update={"engine": config.engine.model_copy(update=values)})


def refused_above(config: EngineConfig, planner: Planner) -> Limit:
    """The largest `max_num_seqs` that the planner accepts, whatever defaults it lowers for it."""
    return _most_sequences(config, planner, lambda count, other: other.ok)


def unlowered_max_num_seqs(config: EngineConfig, result: Fit, planner: Planner) -> Limit:
    """The most sequences, of a KV block each, that fit beside one of the plan's length and its snapshots.

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
    """The longest sequence, at most `positions`, that fits beside the plan's slots and snapshots."""
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
    """Cells by `max_num_seqs`, then by `max_model_len`; the plan's own values are among them."""
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
