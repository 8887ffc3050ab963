"""Two variants of one workload beside each other: are the tokens equal, and which one is faster?"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minivllm_cli.bench.sampling import Sample
from minivllm_cli.bench.variant import Variant
from minivllm_cli.bench.workload import Workload


def compare_tokens(base: Sequence[Sample], other: Sequence[Sample]) -> dict[str, Any]:
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


def speed_up(
    workload: Workload, base: Sequence[Sample], other: Sequence[Sample]
) -> dict[str, float | None]:
    """How many times as fast `other` is, repetition by repetition: median, and half of the spread (None
    for one repetition)."""
    ratios = [b.tok_s(workload) / a.tok_s(workload) for a, b in zip(base, other, strict=True)]
    spread = (max(ratios) - min(ratios)) / 2 if len(ratios) > 1 else None
    return {"ratio": statistics.median(ratios), "spread": spread}


def pair_document(
    workload: Workload,
    base: tuple[Variant, Sequence[Sample]],
    other: tuple[Variant, Sequence[Sample]],
) -> dict[str, Any]:
    """A pair as it stands in results, under "equal". `speed_up` is None for cold and warm where nothing
    was reused: what differs then is noise."""
    reused = any(sample.cached_tokens for sample in (*base[1], *other[1]))
    comparable = reused or not _only_cache_differs(base[0], other[0])
    return {
        "workload": workload.document(),
        "variants": [base[0].name, other[0].name],
        **compare_tokens(base[1], other[1]),
        "speed_up": speed_up(workload, base[1], other[1]) if comparable else None,
    }


def _only_cache_differs(base: Variant, other: Variant) -> bool:
    return base.cache != other.cache and replace(base, name=other.name, cache=other.cache) == other
