"""The document of a running engine: its plan beside what is allocated, and what its cache holds."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minivllm_cli.cache_dump.document import plan_document
from minivllm_cli.config.settings import Settings
from minivllm_cli.engine import ModelShape
from minivllm_cli.files.fingerprint import model_hash
from minivllm_engine.cache.report import CacheReport, CacheSegment
from minivllm_engine.core.config import EngineConfig
from minivllm_engine.core.stats import EngineStats, LoadReport
from minivllm_engine.core.units import count_text
from minivllm_engine.memory.fit import Fit, Planner
from minivllm_engine.memory.layout import MemoryPlan
from minivllm_engine.memory.plan import plan_warnings

if TYPE_CHECKING:
    from minivllm_engine.engine.prepare import PreparedModel
    from minivllm_engine.llm import LLM
    from minivllm_engine.text.tokenizer import Tokenizer

_AGREES = 0.01
_FINEST_BLOCK = 64


class LiveDocument:
    """Makes the document of one engine, as often as it is asked for.

    Args:
        source: the command that runs the engine: "run", "generate" or "chat".
        with_text: nodes have the text of their tokens. Without it there are counts and hashes only.

    Attributes:
        planner: plans for the same model and device with another config.
        load_report: what the engine's start took, once the document was taken.
    """

    def __init__(
        self, source: str, settings: Settings, prepared: "PreparedModel", *, with_text: bool = False
    ) -> None:
        self._source, self._config = source, settings.engine_config
        self._plan = prepared.plan
        tied = prepared.index.seems_tied(prepared.model_config)
        self._tokenizer = prepared.tokenizer if with_text else None
        self.load_report: LoadReport | None = None
        shape = ModelShape(prepared.path, prepared.model_config, tied, from_headers=True)
        self.planner = shape.planner(self._plan.device)
        planned = self.planner(self._config)
        self._base = plan_document(
            settings.model if settings.model == "demo" else prepared.path.name,
            model_hash(prepared.path),
            shape,
            self._config,
            Fit(self._plan, planned.lowered),
            self.planner,
            warnings=plan_warnings(planned, self._config),
            advice=[],
            matrix=False,
        )

    def planned(self) -> dict[str, Any]:
        """Write what is known before the engine is there."""
        return {**self._base, "source": self._source, "time": round(time.time(), 3)}

    def now(self, llm: "LLM") -> dict[str, Any]:
        """Write what is known of a running engine, which must be between two steps."""
        report = llm.cache_report()
        allocated = llm.allocated_bytes()
        self.load_report = llm.load_report
        if self.load_report.graph_sizes:
            allocated = {**allocated, "graph reserve": self.load_report.graph_bytes}
        (device,) = self._base["devices"]
        rows = [{**row, "measured": allocated.get(row["name"])} for row in device["rows"]]
        warnings = [
            *self._base["warnings"],
            *_disagreements(rows),
            *_cautions(report, self._plan, self._config),
        ]
        return {
            **self.planned(),
            "devices": [{**device, "rows": rows}],
            "pools": _pools(self._base["pools"], report.stats),
            "hit": _hit(report),
            "nodes": [_node(segment, self._tokenizer) for segment in report.segments],
            "misses": _shares(report.stats.misses),
            "miss_counts": dict(report.stats.misses),
            "evicted": {
                "snapshots": report.stats.snapshots_evicted,
                "kv_blocks": report.stats.blocks_evicted,
            },
            "warnings": warnings,
            "advice": _advise(report, self._plan, self._config, self.planner),
        }


def _pools(planned: Mapping[str, Any], stats: EngineStats) -> dict[str, Any]:
    return {
        "kv": {
            **planned["kv"],
            "used": stats.kv_blocks_used,
            "peak": stats.kv_blocks_peak,
            "cached": stats.blocks_cached,
        },
        "state": {
            **planned["state"],
            "used": stats.state_slots_used,
            "peak": stats.state_slots_peak,
        },
        "snapshots": {
            **planned["snapshots"],
            "used": stats.snapshots_used,
            "peak": stats.snapshots_peak,
        },
    }


def _hit(report: CacheReport) -> dict[str, Any]:
    stats = report.stats

    def share(tokens: int) -> float:
        return tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0

    return {
        "requests": report.requests,
        "prompt_tokens": stats.prompt_tokens,
        "kv_tokens": stats.kv_matched_tokens,
        "usable_tokens": stats.cached_tokens,
        "restored_tokens": stats.restored_tokens,
        "kv": share(stats.kv_matched_tokens),
        "usable": share(stats.cached_tokens),
    }


def _shares(counts: Mapping[str, int]) -> dict[str, float]:
    total = sum(counts.values())
    return {reason: count / total for reason, count in counts.items()}


def _node(segment: CacheSegment, tokenizer: "Tokenizer | None") -> dict[str, Any]:
    node = {
        "id": segment.id,
        "parent": segment.parent,
        "start": segment.start,
        "end": segment.end,
        "blocks": segment.blocks,
        "hits": segment.hits,
        "refs": segment.refs,
        "snapshot": segment.snapshot,
        "recomputed": segment.recomputed,
        "recomputed_tokens": segment.recomputed_tokens,
        "age": segment.age,
        "hash": segment.hash,
    }
    if tokenizer is not None:
        # Bytes first: a character may lie across two tokens.
        data = b"".join(tokenizer.token_bytes(token) for token in segment.token_ids)
        node["text"] = data.decode("utf-8", "replace")
    return node


def _disagreements(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"{row['name']}: {row['measured']:,} bytes are allocated and {row['bytes']:,} were planned"
        for row in rows
        if row["measured"] is not None and _disagrees(row)
    ]


def _disagrees(row: dict[str, Any]) -> bool:
    difference = row["measured"] - row["bytes"]
    if row["name"] == "graph reserve":  # an upper bound, and meant as one
        return bool(difference > 0)
    return bool(abs(difference) > _AGREES * row["bytes"])


def _cautions(report: CacheReport, plan: MemoryPlan, config: EngineConfig) -> list[str]:
    """Why the cache cannot help these requests, whatever is done about its size."""
    short = report.stats.misses.get("below_granularity", 0)
    shortest = plan.min_reusable_prefix
    if shortest is None or not report.requests or 2 * short < report.requests:
        return []
    return [
        f"{short:,} of {report.requests:,} prompts are too short to hit: at least {shortest + 1} "
        "tokens are needed"
    ]


def _advise(
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
    smaller = shortest is not None and shortest > _FINEST_BLOCK
    if smaller and misses.get("below_granularity") and fits({"block_size": _FINEST_BLOCK}):
        advice.append(
            f"prompts of up to {shortest} tokens cannot hit: "
            f"--set cache.block_size={_FINEST_BLOCK} fits"
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
