"""The document of a running engine: its plan beside what is allocated, and what its cache holds."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minivllm_cli.cache_dump.advice import advise, cautions
from minivllm_cli.cache_dump.document import plan_document
from minivllm_cli.config.settings import Settings
from minivllm_cli.engine import ModelShape
from minivllm_cli.files.fingerprint import model_hash
from minivllm_engine.cache.report import CacheReport, CacheSegment
from minivllm_engine.core.config import EngineConfig
from minivllm_engine.core.load_report import LoadReport
from minivllm_engine.core.stats import EngineStats
from minivllm_engine.memory.fit import Fit
from minivllm_engine.memory.plan import plan_warnings, try_plan

if TYPE_CHECKING:
    from minivllm_engine.engine.prepare import PreparedModel
    from minivllm_engine.llm import LLM
    from minivllm_engine.text.tokenizer import Tokenizer

_AGREES = 0.01


class LiveDocument:
    """Makes the document of one engine, as often as it is asked for.

    Args:
        source: the command that runs the engine: "run", "generate" or "chat".
        with_text: nodes have the text of their tokens. Without it there are counts and hashes only.

    Attributes:
        load_report: what the engine's start took, once the document was taken.
    """

    def __init__(
        self, source: str, settings: Settings, prepared: "PreparedModel", *, with_text: bool = False
    ) -> None:
        self._source, self._config = source, settings.engine_config
        self._plan, self._model = prepared.plan, prepared.model_config
        self._tied = prepared.index.seems_tied(prepared.model_config)
        self._tokenizer = prepared.tokenizer if with_text else None
        self.load_report: LoadReport | None = None
        shape = ModelShape(prepared.path, self._model, self._tied, from_headers=True)
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
        """What is known before the engine is there."""
        return {**self._base, "source": self._source, "time": round(time.time(), 3)}

    def now(self, llm: "LLM") -> dict[str, Any]:
        """What is known of a running engine, which must be between two steps."""
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
            *cautions(report, self._plan, self._config),
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
            "advice": advise(report, self._plan, self._config, self.planner),
        }

    def planner(self, config: EngineConfig) -> Fit:
        """Plan for this model and device with another config."""
        return try_plan(self._model, config, self._plan.device, tied=self._tied)


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
