"""The operations in plain PyTorch: the default on a CPU, and what all others are tested against."""

import torch
import torch.nn.functional as F

from minivllm_engine.ops.attention import reference as attention
from minivllm_engine.ops.causal_conv import reference as conv
from minivllm_engine.ops.embedding.reference import embed
from minivllm_engine.ops.fused import reference as fused
from minivllm_engine.ops.gated_delta import reference as rule
from minivllm_engine.ops.gated_delta.plan import ReferenceChunkPlan, SlotPlan
from minivllm_engine.ops.operations import (
    AttentionOperations,
    Chunks,
    Decodes,
    DeltaInputs,
    DeltaNetOperations,
    DeltaNetWeights,
    Heads,
    Operations,
)
from minivllm_engine.ops.products import SeparateProducts, linear, output_head
from minivllm_engine.ops.sampling.race import likelihoods, race
from minivllm_engine.ops.sampling.reference import greedy
from minivllm_engine.tensors.model_input import ModelInput


def slot_plan(decodes: Decodes) -> SlotPlan:
    assert decodes.starts is not None, "these operations need the positions on the host"
    return SlotPlan.build(decodes.slots, decodes.starts)


def chunk_plan(chunks: Chunks) -> ReferenceChunkPlan:
    return ReferenceChunkPlan.build(chunks.slots, chunks.starts, chunks.lengths)


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, weights: DeltaNetWeights
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute g = -exp(A_log) softplus(a + dt_bias) in fp64, and beta = sigmoid(b)."""
    # In fp64 because the last bit of an fp32 softplus depends on where in a batch the number stands.
    negative_a, dt_bias = weights.fp64_gate
    return negative_a * F.softplus(a.double() + dt_bias), torch.sigmoid(b)


def delta_step(
    inputs: DeltaInputs, weights: DeltaNetWeights, pool: torch.Tensor, plan: SlotPlan
) -> torch.Tensor:
    if plan.fresh is not None:
        pool.index_fill_(0, plan.fresh, 0)
    q, k, v, a, b = inputs
    g, beta = delta_gates(a, b, weights)
    return rule.gated_delta_step(q, k, v, g=g, beta=beta, pool=pool, plan=plan)


def delta_chunks(
    inputs: DeltaInputs, weights: DeltaNetWeights, pool: torch.Tensor, plan: ReferenceChunkPlan
) -> torch.Tensor:
    q, k, v, a, b = inputs
    g, beta = delta_gates(a, b, weights)
    return rule.chunk_gated_delta_rule(q, k, v, g=g, beta=beta, pool=pool, plan=plan)


def conv_step(
    x: torch.Tensor, pool: torch.Tensor, weights: DeltaNetWeights, plan: SlotPlan
) -> torch.Tensor:
    if plan.fresh is not None:
        pool.index_fill_(0, plan.fresh, 0)
    return conv.causal_conv_step(x, pool, weights.fp32_conv_weight, plan.slots)


def conv_chunks(
    x: torch.Tensor, pool: torch.Tensor, weights: DeltaNetWeights, plan: conv.ReferenceConvPlan
) -> Heads:
    return weights.heads(conv.causal_conv_prefill(x, pool, weights.fp32_conv_weight, plan))


def conv_chunk_plan(chunks: Chunks, conv_width: int) -> conv.ReferenceConvPlan:
    return conv.ReferenceConvPlan.build(chunks.slots, chunks.starts, chunks.lengths, conv_width)


def attention_plan(
    batch: ModelInput, shape: attention.KVShape, dtype: torch.dtype
) -> attention.ReferenceAttentionPlan:
    return attention.ReferenceAttentionPlan.build(batch, shape)


REFERENCE_ATTENTION = AttentionOperations(attention_plan, attention.paged_attention)

REFERENCE = Operations(
    graph_decode=False,
    products=SeparateProducts(
        linear=linear,
        output_head=output_head,
        rms_norm=fused.rms_norm,
        add_rms_norm=fused.add_rms_norm,
        gated_rms_norm=fused.gated_rms_norm,
        silu_mul=fused.silu_mul,
        sigmoid_mul=fused.sigmoid_mul,
    ),
    embed=embed,
    rotary_cos_sin=fused.rotary_cos_sin,
    norm_rotate_write=fused.norm_rotate_write,
    greedy=greedy,
    race=race,
    likelihoods=likelihoods,
    delta_net=DeltaNetOperations(
        conv_step=conv_step,
        conv_chunks=conv_chunks,
        conv_step_plan=slot_plan,
        conv_chunk_plan=conv_chunk_plan,
        step=delta_step,
        step_plan=slot_plan,
        chunks=delta_chunks,
        chunk_plan=chunk_plan,
    ),
    attention=REFERENCE_ATTENTION,
)
