"""One row of the results: an variant of a workload, its samples and their figures, as JSON."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minivllm_cli.bench.sampling import Sample
from minivllm_cli.bench.stats import describe, outliers, spread
from minivllm_cli.bench.variant import Variant
from minivllm_cli.bench.workload import Workload
from minivllm_engine.memory.roofline import decode_step_bytes
from minivllm_engine.model_config.config import ModelConfig

_MS = 1000.0
_MOST_HITS = 0.01


@dataclass(frozen=True, slots=True)
class DeviceLimit:
    """What decides how fast a decode step can be.

    Attributes:
        bandwidth: bytes a second that the device was measured to read.
        tied: the output head is the embedding.
    """

    model: ModelConfig
    dtype: str
    state_dtype: str
    tied: bool
    bandwidth: float

    def step_seconds(self, batch: int, context: float) -> float:
        """The floor of a decode step's time."""
        num_bytes = decode_step_bytes(
            self.model,
            self.dtype,
            self.state_dtype,
            batch=batch,
            context=context,
            tied=self.tied,
        )
        return num_bytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Measured:
    """The samples of an variant, in the order of the repetitions; `orders` numbers all samples of the run."""

    workload: Workload
    variant: Variant
    samples: tuple[Sample, ...]
    orders: tuple[int, ...]
    requested: tuple[int, int]
    peak_bytes: int | None = None


def row_document(
    measured: Measured, percents: Sequence[float], limit: DeviceLimit
) -> dict[str, Any]:
    """The row as it stands in results."""
    workload, samples = measured.workload, measured.samples
    prompt_tokens = sum(sample.prompt_tokens for sample in samples)
    cached = sum(sample.cached_tokens for sample in samples)
    matched = sum(sample.kv_matched for sample in samples)
    row: dict[str, Any] = {
        "workload": workload.document(),
        "variant": measured.variant.name,
        "requested": list(measured.requested),
        "prefix_hit": cached / prompt_tokens if prompt_tokens else 0.0,
        "kv_hit": matched / prompt_tokens if prompt_tokens else 0.0,
        "tok_s_of": "prompt" if workload.kind == "prefill" else "output",
        "samples": [
            _sample_document(sample, order, workload)
            for sample, order in zip(samples, measured.orders, strict=True)
        ],
        "tok_s": spread([sample.tok_s(workload) for sample in samples]),
        "limit_fraction": _limit_fraction(measured, limit),
    }
    for name in ("itl", "ttft", "queue", "tpot", "e2e"):
        values = [value for sample in samples for value in getattr(sample, name)]
        row[f"{name}_ms"] = describe(values, percents, scale=_MS)
    return row | {"peak_bytes": measured.peak_bytes}


def _sample_document(sample: Sample, order: int, workload: Workload) -> dict[str, Any]:
    found: dict[str, Any] = {
        "order": order,
        "wall_s": sample.wall,
        "in_tokens": sample.in_tokens,
        "out_tokens": sample.out_tokens,
        "steps": sample.steps,
        "cached_tokens": sample.cached_tokens,
        "kv_matched_tokens": sample.kv_matched,
        "tok_s": sample.tok_s(workload),
    }
    for name in ("itl", "ttft", "queue", "tpot", "e2e"):
        values = getattr(sample, name)
        found[f"{name}_ms"] = statistics.median(values) * _MS if values else None
    return found


def _limit_fraction(measured: Measured, limit: DeviceLimit) -> float | None:
    """Floor over median time of a decode step; None where it is not decode steps that were timed."""
    if not measured.workload.times_decode:
        return None
    gen = measured.workload.gen.low
    floors = [limit.step_seconds(measured.workload.batch, s.context) for s in measured.samples]
    seconds = [sample.wall / gen for sample in measured.samples]
    return statistics.median(floors) / statistics.median(seconds)


def row_warnings(measured: Measured, row: dict[str, Any]) -> list[str]:
    """What makes a row doubtful."""
    name = f"{measured.workload.kind} batch {measured.workload.batch} {measured.variant.name}"
    found = []
    if row["prefix_hit"] >= _MOST_HITS and not measured.workload.reuses_prefixes:
        found.append(
            f"{name}: {row['prefix_hit']:.1%} of the prompt tokens came from the prefix cache"
        )
    rates = [sample["tok_s"] for sample in row["samples"]]
    # Of times, not of rates: those cannot be further below the median than nothing.
    places = outliers([1 / rate for rate in rates])
    if places:
        which = "the first sample" if places[0] == 0 else f"sample {places[0] + 1}"
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        far = rates[places[0]] / row["tok_s"]["median"]
        found.append(
            f"{name}: {which} of {len(rates)}{more} is an outlier ({far:.2f}× the median); "
            "something else took the machine, or --warmup is too small"
        )
    return found
