"""How fast each rotated dimension of a head turns; ops/fused does the turning."""

import math

import torch

from minivllm_engine.model_config.rope import RopeConfig


def inverse_frequencies(rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """[rotary_dim / 2] fp32, yarn's ramp included (arXiv 2309.00071, as in transformers)."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.rope_type != "yarn":
        return frequencies

    def dimension(rotations: float) -> float:
        """The dimension that turns so many times over the original context."""
        period = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rotary_dim * math.log(period) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)
