"""How far a plan could go: the largest value of one setting, and what fits of many pairs of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from minivllm_engine.config import EngineConfig
from minivllm_engine.memory_fit import Fit, largest
from minivllm_engine.memory_layout import SHORTEST_SEQUENCE, MemoryPlan

LENGTHS = tuple(1024 * n for n in (4, 8, 16, 32, 64, 128))
SEQUENCES = (16, 32, 64, 128, 256)
_MOST_SEQUENCES = 1 << 20

Planner = Callable[[EngineConfig], Fit]
Verdict = Literal["ok", "KV", "state", "both"]


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


def largest_max_num_seqs(config: EngineConfig, result: Fit, planner: Planner) -> int:
    """The most sequences, of a block each, that fit beside one of the plan's length and snapshots.

    Args:
        result: of planning `config`.
    """
    base = with_engine(config, max_model_len=result.plan.max_model_len)

    def fits(count: int) -> bool:
        other = planner(with_engine(base, max_num_seqs=count))
        has_blocks = not other.plan.block_bytes or other.plan.num_blocks >= count
        return has_blocks and _as_good(other, result)

    return largest(fits, _MOST_SEQUENCES) or 0


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

    def has_snapshots(one: Fit) -> bool:
        return all(lowered.key != "cache.snapshot_memory" for lowered in one.lowered)

    return other.ok and (has_snapshots(other) or not has_snapshots(result))


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
