"""What is counted during a run, and the summary made of it."""

import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from minivllm_cli.batch.verify import VerifyCounts, verify_document
from minivllm_engine.core.outputs import RequestOutput
from minivllm_engine.core.stats import EngineStats
from minivllm_engine.protocol.records import error_code, finish_reasons, record_failed


@dataclass
class Tally:
    """Counters of one run. Requests answered by an earlier run count as requests, not as work.

    Attributes:
        started: when the command began.
        load_s, generate_s: seconds spent.
        ttft, e2e: seconds of each answered request.
        num_run: requests that were run to their end, well or not: those whose tokens are counted.
        misses: of those, by their miss reason.
        verify: what came of the replays, if there were to be any.
        complete: the run came to its end; False once a signal ended it early.
    """

    started: float = field(default_factory=time.monotonic)
    load_s: float = 0.0
    generate_s: float = 0.0
    num_ok: int = 0
    num_resumed: int = 0
    num_truncated: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    num_run: int = 0
    num_outputs: int = 0
    in_tokens: int = 0
    cached_tokens: int = 0
    kv_matched_tokens: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    out_tokens: int = 0
    reasoning_tokens: int = 0
    ttft: "array[float]" = field(default_factory=lambda: array("d"))
    e2e: "array[float]" = field(default_factory=lambda: array("d"))
    stats: EngineStats | None = None
    verify: VerifyCounts | None = None
    complete: bool = True

    @property
    def hit(self) -> float:
        """Share of the prompt tokens that were reused."""
        return self.cached_tokens / self.in_tokens if self.in_tokens else 0.0

    @property
    def num_failed(self) -> int:
        """Requests that ended in an error record."""
        return self.failed.total()

    @property
    def num_records(self) -> int:
        """Requests that have a record, good or bad."""
        return self.num_ok + self.num_failed

    def add_record(self, record: dict[str, Any]) -> None:
        """Count a record of the output, new or from an earlier run."""
        if record_failed(record):
            self.failed[error_code(record)] += 1
            return
        self.num_ok += 1
        self.ended.update(finish_reasons(record))

    def add_output(self, output: RequestOutput) -> None:
        """Count the work of a request that was run to its end."""
        self.num_run += 1
        self.num_outputs += len(output.outputs)
        self.in_tokens += output.usage.prompt_tokens
        self.cached_tokens += output.usage.cached_tokens
        self.kv_matched_tokens += output.usage.kv_matched
        if output.usage.miss_reason is not None:
            self.misses[output.usage.miss_reason] += 1
        self.out_tokens += output.usage.completion_tokens
        self.reasoning_tokens += output.usage.reasoning_tokens
        if output.timing.ttft_s is not None:
            self.ttft.append(output.timing.ttft_s)
        if output.timing.e2e_s is not None:
            self.e2e.append(output.timing.e2e_s)

    def summary(self) -> dict[str, Any]:
        """Make the document of `--summary`."""
        stats = self.stats
        generate = self.generate_s
        document: dict[str, Any] = {
            "schema_version": 1,
            "complete": self.complete,
            "requests": {
                "ok": self.num_ok,
                "failed": dict(self.failed),
                "length": self.ended["length"],
                "context": self.ended["context"],
                "resumed": self.num_resumed,
            },
            "tokens": {
                "in": self.in_tokens,
                "cached": self.cached_tokens,
                "out": self.out_tokens,
                "reasoning": self.reasoning_tokens,
            },
            "seconds": {
                "wall": round(time.monotonic() - self.started, 3),
                "load": round(self.load_s, 3),
                "capture": 0,
                "generate": round(generate, 3),
            },
            "tok_s": {
                "in": round(self.in_tokens / generate, 1) if generate else 0,
                "out": round(self.out_tokens / generate, 1) if generate else 0,
            },
            "ttft_s": percentiles(self.ttft),
            "e2e_s": percentiles(self.e2e),
            "peak": {
                "kv_blocks": stats.kv_blocks_peak if stats else 0,
                "state_slots": stats.state_slots_peak if stats else 0,
                "snapshots": stats.snapshots_peak if stats else 0,
            },
            "cache": {
                "hit": round(self.hit, 4),
                "kv_matched": self.kv_matched_tokens,
                "restored": stats.restored_tokens if stats else 0,
                "misses": dict(self.misses.most_common()),
                "blocks_evicted": stats.blocks_evicted if stats else 0,
                "snapshots_evicted": stats.snapshots_evicted if stats else 0,
            },
            "preemptions": stats.num_preemptions if stats else 0,
            "limited_by": _limited_by(stats),
        }
        if self.verify is not None:
            document["verify"] = verify_document(self.verify)
        return document


def percentiles(values: "array[float]") -> dict[str, float]:
    """Return p50, p90 and p99, each a value that occurred; {} where there are none."""
    if not values:
        return {}
    ordered = sorted(values)
    last = len(ordered) - 1
    return {f"p{p}": round(ordered[round(last * p / 100)], 4) for p in (50, 90, 99)}


def _limited_by(stats: EngineStats | None) -> dict[str, float]:
    if stats is None or not stats.num_steps:
        return {}
    return {name: round(n / stats.num_steps, 3) for name, n in stats.bound_steps.items() if n}
