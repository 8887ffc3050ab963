"""What can be done about a cache that helps less than it could. Sizes are asked of the planner first."""

from typing import Any

from minivllm_engine.cache.report import CacheReport
from minivllm_engine.core.config import EngineConfig
from minivllm_engine.core.units import count_text
from minivllm_engine.memory.layout import MemoryPlan
from minivllm_engine.memory.suggest import Planner

_SMALLEST_GRID = 64


def cautions(report: CacheReport, plan: MemoryPlan, config: EngineConfig) -> list[str]:
    """Why the cache cannot help these requests, whatever is done about its size."""
    short = report.stats.misses.get("below_granularity", 0)
    shortest = plan.min_reusable_prefix
    if shortest is None or not report.requests or 2 * short < report.requests:
        return []
    return [
        f"{short:,} of {report.requests:,} prompts are too short to hit: at least {shortest + 1} "
        "tokens are needed"
    ]


def advise(
    report: CacheReport, plan: MemoryPlan, config: EngineConfig, planner: Planner
) -> list[str]:
    """Things to try, one a line; each `--set` in them is accepted by the planner."""
    stats, misses = report.stats, report.stats.misses
    if not plan.prefix_cache:
        return ["the prefix cache is off: --set cache.prefix_cache=true"]

    def fits(changes: dict[str, Any]) -> bool:
        cache = config.cache.model_copy(update=changes)
        other = planner(config.model_copy(update={"cache": cache}))
        same = (other.plan.max_num_seqs, other.plan.max_model_len)
        return other.ok and same == (plan.max_num_seqs, plan.max_model_len)

    advice = []
    in_vain = misses.get("evicted", 0) + misses.get("no_snapshot", 0)
    if stats.snapshots_evicted and in_vain:
        kib = -(-2 * plan.snapshot_bytes // 1024)
        flag = f"--set cache.snapshot_memory={kib}KiB"
        lost = _given_up(stats.snapshots_evicted, "snapshot")
        advice.append(_more(lost, flag, fits({"snapshot_memory": 1024 * kib})))
    if stats.blocks_evicted and misses.get("evicted"):
        count = 2 * plan.num_blocks
        lost = _given_up(stats.blocks_evicted, "KV block")
        advice.append(_more(lost, f"--set cache.num_blocks={count}", fits({"num_blocks": count})))
    shortest = plan.min_reusable_prefix
    smaller = shortest is not None and shortest > _SMALLEST_GRID
    if smaller and misses.get("below_granularity") and fits({"block_size": _SMALLEST_GRID}):
        advice.append(
            f"prompts of up to {shortest} tokens cannot hit: "
            f"--set cache.block_size={_SMALLEST_GRID} fits"
        )
    if misses.get("template_divergence"):
        advice.append(
            "the chat template tells earlier answers otherwise than they were given: "
            "their thinking may be left out"
        )
    return advice


def _given_up(count: int, noun: str) -> str:
    return f"{count_text(count, noun)} {'was' if count == 1 else 'were'} given up for room"


def _more(lost: str, flag: str, fits: bool) -> str:
    return f"{lost}: {flag if fits else 'twice as much of it'} {'fits' if fits else 'does not fit'}"
