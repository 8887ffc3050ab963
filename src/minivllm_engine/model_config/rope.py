"""Rotary position embedding as config.json describes it, in any of three spellings.

`rope_parameters` (transformers 5), `rope_scaling` beside flat keys (transformers 4), flat keys alone.
A value inside the object counts before a flat key, and that before the default.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minivllm_engine.model_config.reader import LARGEST, ConfigReader

logger = logging.getLogger(__name__)

_FALLBACK_THETA = 10_000.0
_FALLBACK_PARTIAL = 0.25
_FALLBACK_LENGTH = 32768
# Bounds of yarn's numbers: none of a model is near them, and no fp32 result of them overflows.
_ORDINARY = {"at_least": 1e-6, "at_most": 1e6}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of the attention layers.

    Attributes:
        theta: base of the frequencies.
        partial_rotary_factor: share of each head's dimensions that is rotated, from the first on.
        rope_type: "default", or "yarn" (arXiv 2309.00071), for which alone the rest counts.
        factor: by how much yarn lengthens the context.
        original_max_position_embeddings: the context length before yarn.
        attention_factor: multiplies cos and sin.
        beta_fast, beta_slow: rotations over the original context where yarn's ramp starts and ends.
        truncate: the ramp's ends are rounded to whole dimensions.
    """

    theta: float
    partial_rotary_factor: float
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def read_rope(reader: ConfigReader, *, warn: bool) -> tuple[RopeConfig, int]:
    """Return the resolved embedding and the longest sequence that it is made for, yarn's factor included.

    Args:
        warn: log a warning where rope_theta is missing.

    Raises:
        CheckpointError: a value of the wrong type or range, or an unknown rope_type.
    """
    key = "rope_parameters" if reader.get("rope_scaling") is None else "rope_scaling"
    given = reader.get(key) or {}
    if not isinstance(given, Mapping):
        raise reader.wrong(key, given, "an object")
    theta = _first(given, reader, "rope_theta")
    if theta is None and warn:
        logger.warning(
            "%s has no rope_theta: falling back to %g. Qwen3.5 models need 1e7; "
            "with a wrong value answers degrade without an error.",
            reader.source,
            _FALLBACK_THETA,
        )
    theta = reader.number("rope_theta", _FALLBACK_THETA if theta is None else theta)
    partial = _first(given, reader, "partial_rotary_factor")
    partial = reader.number(
        "partial_rotary_factor", _FALLBACK_PARTIAL if partial is None else partial, at_most=1
    )
    length = reader.get("max_position_embeddings")
    length = reader.integer(
        "max_position_embeddings", _FALLBACK_LENGTH if length is None else length, at_least=2
    )
    rope_type = given.get("rope_type") or given.get("type") or "default"
    if rope_type == "default":
        return RopeConfig(theta, partial), length
    if rope_type != "yarn":
        raise reader.wrong(f"{key}.rope_type", rope_type, "'default' or 'yarn'")
    yarn = _read_yarn(reader, key, given, theta, partial, length)
    longest = yarn.original_max_position_embeddings * yarn.factor
    if longest > LARGEST:
        raise reader.wrong(
            f"{key}.factor", yarn.factor, f"one that gives at most {LARGEST:,} positions"
        )
    return yarn, int(longest)


def _first(given: Mapping[str, Any], reader: ConfigReader, key: str) -> Any:
    return given[key] if given.get(key) is not None else reader.get(key)


def _read_yarn(
    reader: ConfigReader,
    key: str,
    given: Mapping[str, Any],
    theta: float,
    partial: float,
    length: int,
) -> RopeConfig:
    def number(name: str, default: float, **limits: float) -> float:
        value = given.get(name)
        value = default if value is None else value
        return reader.number(f"{key}.{name}", value, **(_ORDINARY | limits))

    # Yarn's ramp is computed from logarithms of the base.
    reader.number("rope_theta", theta, above=1)
    original = given.get("original_max_position_embeddings")
    original = reader.integer(
        f"{key}.original_max_position_embeddings",
        length if original is None else original,
        at_least=2,
    )
    factor = number("factor", max(length / original, 1.0), at_least=1.0, at_most=float(LARGEST))
    scales = [number(name, 1.0) for name in ("mscale", "mscale_all_dim") if given.get(name)]
    return RopeConfig(
        theta,
        partial,
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=number("attention_factor", _attention_factor(factor, scales)),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=reader.boolean(f"{key}.truncate", given.get("truncate", True)),
    )


def _attention_factor(factor: float, scales: list[float]) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    return scale(scales[0]) / scale(scales[1]) if len(scales) == 2 else scale(1.0)
