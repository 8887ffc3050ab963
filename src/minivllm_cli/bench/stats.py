"""Statistics of samples: percentiles, spreads, outliers, and whether two runs differ."""

import random
import statistics
from collections.abc import Sequence
from typing import Any

_OUTLIER_SCORE = 3.5  # Iglewicz and Hoaglin, for modified z-scores
# Samples that all but agree would make an outlier of the least deviation.
_LEAST_DEVIATION = 0.01
_RESAMPLES = 2000
FEWEST = 5  # samples of which an interval can be made


def percentile(values: Sequence[float], percent: float) -> float:
    """Tell the value below which `percent` of `values` lie, interpolated. There is at least one value."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def describe(values: Sequence[float], percents: Sequence[float], *, scale: float) -> dict[str, Any]:
    """List percentiles, mean, standard deviation and number of `values` times `scale`; {} without any."""
    if not values:
        return {}
    scaled = [value * scale for value in values]
    found: dict[str, Any] = {f"p{p:g}": percentile(scaled, p) for p in percents}
    return found | {
        "mean": statistics.fmean(scaled),
        "std": statistics.pstdev(scaled),
        "n": len(scaled),
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """List median, smallest, largest, mean, standard deviation and number of `values`."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "mean": statistics.fmean(values),
        "std": statistics.pstdev(values),
        "n": len(values),
    }


def outliers(values: Sequence[float]) -> list[int]:
    """Find the places of values with a modified z-score above 3.5.

    Of fewer than 5 values, of those that are off by more than a factor of 2.
    """
    if not values:
        return []
    median = statistics.median(values)
    if len(values) < FEWEST:
        return [i for i, v in enumerate(values) if not median / 2 <= v <= median * 2]
    deviation = statistics.median([abs(value - median) for value in values])
    deviation = max(deviation, _LEAST_DEVIATION * abs(median))
    scores = [0.6745 * abs(value - median) / deviation if deviation else 0.0 for value in values]
    return [i for i, score in enumerate(scores) if score > _OUTLIER_SCORE]


def interval_of_change(base: Sequence[float], new: Sequence[float]) -> tuple[float, float] | None:
    """Compute the 95 % bootstrap interval of median(new) / median(base) - 1.

    None for fewer than 5 samples a side. The same samples give the same interval.
    """
    if min(len(base), len(new)) < FEWEST:
        return None
    rng = random.Random(0)
    changes = sorted(
        statistics.median(rng.choices(new, k=len(new)))
        / statistics.median(rng.choices(base, k=len(base)))
        - 1
        for _ in range(_RESAMPLES)
    )
    return percentile(changes, 2.5), percentile(changes, 97.5)
