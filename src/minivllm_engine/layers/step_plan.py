"""What all layers of a step share, worked out once from its ModelInput."""

from dataclasses import dataclass

import torch

from minivllm_engine.layers.rotary import rotary_cos_sin
from minivllm_engine.model_config import ModelConfig
from minivllm_engine.model_input import ModelInput
from minivllm_engine.ops.attention.reference import AttentionPlan, KVShape
from minivllm_engine.ops.causal_conv.reference import ConvPlan
from minivllm_engine.ops.gated_delta.plan import ChunkPlan, SlotPlan


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What the DeltaNet layers need to know of the prefill chunks of a step."""

    conv: ConvPlan
    chunks: ChunkPlan


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Shared by the layers of one step. Decodes come first, prefill chunks after them.

    Attributes:
        cos, sin: [num_tokens, 1, rotary_dim / 2].
        kv_slots: [num_tokens], where keys and values are written.
        decode, prefill: None where there is nothing of the kind.
    """

    num_decodes: int
    cos: torch.Tensor
    sin: torch.Tensor
    kv_slots: torch.Tensor
    attention: AttentionPlan
    decode: SlotPlan | None
    prefill: PrefillPlan | None

    @classmethod
    def build(
        cls,
        batch: ModelInput,
        config: ModelConfig,
        frequencies: torch.Tensor,
        *,
        block_size: int,
        dtype: torch.dtype,
    ) -> "StepPlan":
        cut = batch.num_decodes
        cos, sin = rotary_cos_sin(batch.positions, frequencies, config.rope.attention_factor, dtype)
        shape = KVShape(
            block_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )
        prefill = None
        if cut < len(batch.lengths):
            chunks = batch.slots[cut:], batch.starts[cut:], batch.lengths[cut:]
            conv = ConvPlan.build(*chunks, config.linear_conv_kernel_dim)
            prefill = PrefillPlan(conv, ChunkPlan.build(*chunks))
        return cls(
            num_decodes=cut,
            cos=cos,
            sin=sin,
            kv_slots=batch.kv_slots,
            attention=AttentionPlan.build(batch, shape),
            decode=SlotPlan.build(batch.slots[:cut], batch.starts[:cut]) if cut else None,
            prefill=prefill,
        )
