"""Rotary position embedding as config.json describes it, in any of three spellings.

`rope_parameters` (transformers 5), `rope_scaling` beside flat keys (transformers 4), flat keys alone.
A value inside the object counts before a flat key, and that before the default.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minivllm_engine.model_config.reader import ConfigReader

logger = logging.getLogger(__name__)

_FALLBACK_THETA = 10_000.0
_FALLBACK_PARTIAL = 0.25
_FALLBACK_LENGTH = 32768


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
    """The resolved embedding and the longest sequence that it is made for, yarn's factor included.

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
        "partial_rotary_factor", _FALLBACK_PARTIAL if partial is None else partial
    )
    if partial > 1:
        raise reader.wrong("partial_rotary_factor", partial, "a number above 0, at most 1")
    length = reader.get("max_position_embeddings")
    length = reader.integer(
        "max_position_embeddings", _FALLBACK_LENGTH if length is None else length
    )
    rope_type = given.get("rope_type") or given.get("type") or "default"
    if rope_type == "default":
        return RopeConfig(theta, partial), length
    if rope_type != "yarn":
        raise reader.wrong(f"{key}.rope_type", rope_type, "'default' or 'yarn'")
    yarn = _read_yarn(reader, key, given, theta, partial, length)
    return yarn, int(yarn.original_max_position_embeddings * yarn.factor)


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
    def number(name: str, default: float) -> float:
        value = given.get(name)
        return reader.number(f"{key}.{name}", default if value is None else value)

    original = given.get("original_max_position_embeddings")
    original = reader.integer(
        f"{key}.original_max_position_embeddings", length if original is None else original
    )
    factor = number("factor", length / original)
    return RopeConfig(
        theta,
        partial,
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=number("attention_factor", _attention_factor(factor, given)),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=reader.boolean(f"{key}.truncate", given.get("truncate", True)),
    )


def _attention_factor(factor: float, given: Mapping[str, Any]) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
    return scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0)
