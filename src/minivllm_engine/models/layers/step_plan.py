"""What all layers of a step share, worked out once from its ModelInput."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.model_config.rope import RopeConfig
from minivllm_engine.ops.attention.reference import KVShape
from minivllm_engine.ops.operations import Chunks, Decodes, Operations
from minivllm_engine.ops.products import Products
from minivllm_engine.tensors.model_input import ModelInput


def inverse_frequencies(rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """Compute [rotary_dim / 2] fp32, yarn's ramp included (arXiv 2309.00071, as in transformers)."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.rope_type != "yarn":
        return frequencies

    def dimension(rotations: float) -> float:
        """Return the dimension that turns so many times over the original context."""
        period = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rotary_dim * math.log(period) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)


def kv_shape(config: ModelConfig, block_size: int) -> KVShape:
    """Say how the cache of a model is laid out, and what reads it."""
    return KVShape(
        block_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    )


@dataclass(frozen=True, slots=True)
class DeltaPlan:
    """What the DeltaNet layers need to know of the decodes of a step, or of its chunks."""

    conv: Any
    rule: Any


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Shared by the layers of one step. Decodes come first, prefill chunks after them.

    Attributes:
        cos, sin: [num_tokens, 1, rotary_dim / 2].
        kv_slots: [num_tokens], where keys and values are written.
        decode, prefill: None where there is nothing of the kind.
    """

    products: Products
    num_decodes: int
    cos: torch.Tensor
    sin: torch.Tensor
    kv_slots: torch.Tensor
    attention: Any
    decode: DeltaPlan | None
    prefill: DeltaPlan | None

    @classmethod
    def build(
        cls,
        batch: ModelInput,
        config: ModelConfig,
        operations: Operations,
        frequencies: torch.Tensor,
        *,
        block_size: int,
        dtype: torch.dtype,
    ) -> "StepPlan":
        cut, delta_net = batch.num_decodes, operations.delta_net
        factor = config.rope.attention_factor
        cos, sin = operations.rotary_cos_sin(batch.positions, frequencies, factor, dtype)
        shape = kv_shape(config, block_size)
        decode = prefill = None
        if cut:
            some = Decodes(batch.slots[:cut], batch.positions[:cut], batch.starts[:cut])
            conv = delta_net.conv_step_plan(some)
            shared = delta_net.step_plan is delta_net.conv_step_plan
            decode = DeltaPlan(conv, conv if shared else delta_net.step_plan(some))
        if cut < len(batch.lengths):
            chunks = Chunks(batch.slots[cut:], batch.starts[cut:], batch.lengths[cut:])
            conv = delta_net.conv_chunk_plan(chunks, config.linear_conv_kernel_dim)
            prefill = DeltaPlan(conv, delta_net.chunk_plan(chunks))
        return cls(
            products=operations.products_for(batch.token_ids.shape[0]),
            num_decodes=cut,
            cos=cos,
            sin=sin,
            kv_slots=batch.kv_slots,
            attention=operations.attention.plan(batch, shape, dtype),
            decode=decode,
            prefill=prefill,
        )
