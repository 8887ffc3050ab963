"""Rows of the results as JSON: a variant's samples and their figures, and two variants beside each other."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minivllm_cli.bench.sampling import Sample
from minivllm_cli.bench.stats import describe, outliers, spread
from minivllm_cli.bench.variant import Variant
from minivllm_cli.bench.workload import Workload
from minivllm_engine.memory.roofline import decode_step_bytes

if TYPE_CHECKING:
    from minivllm_engine.engine.prepare import PreparedModel

_MS = 1000.0
_MOST_HITS = 0.01
_LATENCIES = ("itl", "ttft", "queue", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class DeviceLimit:
    """What decides how fast a decode step of a model can be.

    Attributes:
        bandwidth: bytes a second that the device was measured to read.
    """

    prepared: "PreparedModel"
    bandwidth: float

    def step_seconds(self, batch: int, context: float) -> float:
        """Tell the floor of a decode step's time."""
        model, plan = self.prepared.model_config, self.prepared.plan
        tied = self.prepared.index.seems_tied(model)
        num_bytes = decode_step_bytes(
            model, plan.dtype, plan.state_dtype, batch=batch, context=context, tied=tied
        )
        return num_bytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Measured:
    """The samples of a variant, in the order of the repetitions; `orders` numbers all samples of the run.

    Attributes:
        requested: prompt and output tokens of a request; of lengths that are drawn, all together.
    """

    workload: Workload
    variant: Variant
    samples: tuple[Sample, ...]
    orders: tuple[int, ...]
    requested: tuple[int, int]
    peak_bytes: int | None = None


def row_document(
    measured: Measured, percents: Sequence[float], limit: DeviceLimit
) -> dict[str, Any]:
    """Write the row as it stands in results."""
    workload, samples = measured.workload, measured.samples
    prompt_tokens = sum(sample.prompt_tokens for sample in samples) or 1
    row: dict[str, Any] = {
        "workload": workload.document(),
        "variant": measured.variant.name,
        "requested": list(measured.requested),
        "prefix_hit": sum(sample.cached_tokens for sample in samples) / prompt_tokens,
        "kv_hit": sum(sample.kv_matched for sample in samples) / prompt_tokens,
        "tok_s_of": "prompt" if workload.kind == "prefill" else "output",
        "samples": [
            _sample_document(sample, order, workload)
            for sample, order in zip(samples, measured.orders, strict=True)
        ],
        "tok_s": spread([sample.tok_s(workload) for sample in samples]),
        "limit_fraction": _limit_fraction(measured, limit),
    }
    for name in _LATENCIES:
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
    for name in _LATENCIES:
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
    """Say what makes a row doubtful."""
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


def pair_document(base: Measured, other: Measured) -> dict[str, Any]:
    """Write a pair as it stands in results, under "equal": are tokens equal, and which one is faster?

    `speed_up` is None for cold and warm where nothing was reused: what differs then is noise.
    """
    reused = any(sample.cached_tokens for sample in (*base.samples, *other.samples))
    comparable = reused or not _only_cache_differs(base.variant, other.variant)
    return {
        "workload": base.workload.document(),
        "variants": [base.variant.name, other.variant.name],
        **_compare_tokens(base.samples, other.samples),
        "speed_up": _speed_up(base, other) if comparable else None,
    }


def _compare_tokens(base: Sequence[Sample], other: Sequence[Sample]) -> dict[str, Any]:
    """How many requests got the same tokens, over all repetitions, and the first place where one did not."""
    equal = total = 0
    first: dict[str, Any] | None = None
    for repetition, (one, two) in enumerate(zip(base, other, strict=True)):
        for request, (a, b) in enumerate(zip(one.tokens, two.tokens, strict=True)):
            total += 1
            if a == b:
                equal += 1
            elif first is None:
                first = {"repetition": repetition, "request": request, **_divergence(a, b)}
    return {"equal": equal, "of": total, "first_divergence": first}


def _divergence(a: Sequence[int], b: Sequence[int]) -> dict[str, Any]:
    shorter = min(len(a), len(b))
    position = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    ids = [tokens[position] if position < len(tokens) else None for tokens in (a, b)]
    return {"position": position, "ids": ids}


def _speed_up(base: Measured, other: Measured) -> dict[str, float | None]:
    """How many times as fast `other` is, repetition by repetition: median, and half of the spread (None
    for one repetition)."""
    workload = base.workload
    ratios = [
        b.tok_s(workload) / a.tok_s(workload)
        for a, b in zip(base.samples, other.samples, strict=True)
    ]
    half = (max(ratios) - min(ratios)) / 2 if len(ratios) > 1 else None
    return {"ratio": statistics.median(ratios), "spread": half}


def _only_cache_differs(base: Variant, other: Variant) -> bool:
    return base.cache != other.cache and replace(base, name=other.name, cache=other.cache) == other
