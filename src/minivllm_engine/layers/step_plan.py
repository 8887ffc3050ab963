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
        fresh_slots: slots whose sequence begins here: their state is zero, whatever they hold.
        decode, prefill: None where there is nothing of the kind.
    """

    num_decodes: int
    cos: torch.Tensor
    sin: torch.Tensor
    kv_slots: torch.Tensor
    attention: AttentionPlan
    fresh_slots: torch.Tensor | None
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
        fresh = [i for i, start in enumerate(batch.starts) if start == 0]
        lengths = batch.lengths[cut:]
        device = batch.slots.device
        prefill = None
        if lengths:
            prefill = PrefillPlan(
                ConvPlan.build(batch.slots[cut:], lengths, config.linear_conv_kernel_dim),
                ChunkPlan.build(batch.slots[cut:], lengths),
            )
        shape = KVShape(
            block_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )
        return cls(
            num_decodes=cut,
            cos=cos,
            sin=sin,
            kv_slots=batch.kv_slots,
            attention=AttentionPlan.build(batch, shape),
            fresh_slots=batch.slots[torch.tensor(fresh, device=device)] if fresh else None,
            decode=SlotPlan.build(batch.slots[:cut]) if cut else None,
            prefill=prefill,
        )
