"""The operations as Triton kernels, with FLA's chunked delta rule for prompts: for GPUs from sm_80 on.

Importing this module needs Triton.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from minivllm_engine.ops.attention import flash
from minivllm_engine.ops.attention import triton as attention
from minivllm_engine.ops.attention.reference import KVShape
from minivllm_engine.ops.attention.tiles import prefill_tile
from minivllm_engine.ops.causal_conv import triton as conv
from minivllm_engine.ops.device import device_limits
from minivllm_engine.ops.embedding.triton import embed
from minivllm_engine.ops.fused import triton as fused
from minivllm_engine.ops.gated_delta import fla
from minivllm_engine.ops.gated_delta import reference as reference_rule
from minivllm_engine.ops.gated_delta import triton as rule
from minivllm_engine.ops.gated_delta.plan import ReferenceChunkPlan
from minivllm_engine.ops.operations import (
    AttentionOperations,
    Chunks,
    Decodes,
    DeltaInputs,
    DeltaNetOperations,
    DeltaNetWeights,
    DeltaRule,
    Heads,
    Operations,
)
from minivllm_engine.ops.products import SeparateProducts, plain_linear, plain_output_head
from minivllm_engine.ops.prompt_buffers import PromptBucket
from minivllm_engine.ops.reference_backend import REFERENCE_ATTENTION, delta_step, slot_plan
from minivllm_engine.ops.sampling.race_triton import likelihoods, race
from minivllm_engine.ops.sampling.triton import greedy
from minivllm_engine.ops.small_batch.products import SmallBatchProducts
from minivllm_engine.tensors.device_copy import cast, fp32
from minivllm_engine.tensors.model_input import ModelInput

AttentionBackend = Literal["reference", "triton", "flash"]
ChunkBackend = Literal["auto", "reference", "fla"]
StepBackend = Literal["reference", "fla", "triton"]

# Up to here products that read each weight once take less time than a library's, of which more rows take no
# longer than few.
_FEW_ROWS = 2
# Up to here our recurrent rule takes less time than FLA's chunked one.
_SHORT = 64


@dataclass(frozen=True, slots=True)
class LanePlan:
    """Where the states of decodes lie; negative slots are padding."""

    slots: torch.Tensor
    positions: torch.Tensor


def _lane_plan(decodes: Decodes) -> LanePlan:
    return LanePlan(decodes.slots, decodes.positions)


def _conv_step(
    x: torch.Tensor, pool: torch.Tensor, weights: DeltaNetWeights, plan: LanePlan
) -> torch.Tensor:
    return conv.causal_conv_step(
        x, pool, weights.conv_weight, slots=plan.slots, positions=plan.positions
    )


def _conv_chunks(
    x: torch.Tensor, pool: torch.Tensor, weights: DeltaNetWeights, plan: conv.TritonConvPlan
) -> Heads:
    keys, heads, rows = weights.key_dim, weights.num_heads, x.shape[0]
    # What is no power of two cannot be normed within the kernel.
    apart = plan.normed and bool(keys // heads & (keys // heads - 1))
    packed = conv.causal_conv_prefill(
        x,
        pool,
        weights.conv_weight,
        replace(plan, normed=False) if apart else plan,
        key_dim=keys,
        num_heads=heads,
    )
    sizes = [rows * keys, rows * keys, rows * weights.value_dim]
    q, k, v = torch.split_with_sizes(packed, sizes)
    q, k = (x.view(rows, heads, -1) for x in (q, k))
    if apart:
        q, k = (cast(reference_rule.l2norm(fp32(x)), x.dtype) for x in (q, k))
    return q, k, v.view(rows, weights.num_value_heads, -1)


def _conv_plan(chunks: Chunks, conv_width: int, *, normed: bool) -> conv.TritonConvPlan:
    return conv.TritonConvPlan.build(chunks.slots, chunks.starts, chunks.lengths, normed=normed)


def _prompt_conv_plan(chunks: Chunks, conv_width: int) -> conv.TritonConvPlan:
    return _conv_plan(chunks, conv_width, normed=not _is_short(chunks))


def _by_lane(step: Callable[..., torch.Tensor]) -> DeltaRule:
    """A step that takes slots and positions, behind the interface of all."""

    def run(
        inputs: DeltaInputs, weights: DeltaNetWeights, pool: torch.Tensor, plan: LanePlan
    ) -> torch.Tensor:
        q, k, v, a, b = inputs
        where = {"slots": plan.slots, "positions": plan.positions}
        gate = {"A_log": weights.A_log, "dt_bias": weights.dt_bias}
        return step(q, k, v, a=a, b=b, **gate, pool=pool, **where)

    return run


def _prompt_chunks(
    inputs: DeltaInputs,
    weights: DeltaNetWeights,
    pool: torch.Tensor,
    plan: fla.FlaChunkPlan | rule.RecurrentPlan,
) -> torch.Tensor:
    q, k, v, a, b = inputs
    if isinstance(plan, rule.RecurrentPlan):
        gate = {"A_log": weights.A_log, "dt_bias": weights.dt_bias}
        return rule.gated_delta_recurrent(q, k, v, a=a, b=b, **gate, pool=pool, plan=plan)
    g, beta = rule.delta_gates(a, b, weights.A_log, weights.dt_bias)
    return fla.chunk_gated_delta_rule(q, k, v, g=g, beta=beta, pool=pool, plan=plan)


def _is_short(chunks: Chunks) -> bool:
    # FLA takes a millisecond of the host's time a layer, however short the chunks are.
    return max(chunks.lengths) <= _SHORT


def _prompt_plan(chunks: Chunks) -> fla.FlaChunkPlan | rule.RecurrentPlan:
    if _is_short(chunks):
        return rule.RecurrentPlan.build(chunks.slots, chunks.starts, chunks.lengths)
    return _fla_plan(chunks)


def _graph_chunks(
    bucket: PromptBucket, shape: KVShape, dtype: torch.dtype
) -> tuple[
    attention.TritonAttentionPlan, conv.TritonConvPlan, fla.FlaChunkPlan | rule.RecurrentPlan
]:
    tile = prefill_tile(shape, dtype, device_limits(bucket.device))
    attend = attention.TritonAttentionPlan(
        num_decodes=0,
        num_splits=1,
        positions=bucket.positions[:0],
        block_tables=bucket.block_tables,
        prefill=bucket.packed(tile.num_tokens),
        tile=tile,
    )
    slots, starts, bounds = bucket.slots, bucket.starts, bucket.bounds
    short = bucket.num_tokens <= _SHORT
    convolve = conv.TritonConvPlan(slots, bucket.packed(conv.TILE_TOKENS), normed=not short)
    if short:
        return attend, convolve, rule.RecurrentPlan(slots, starts, bounds)
    chunks = fla.FlaChunkPlan(slots, starts, bounds, bucket.chunks, bucket.chunk_offsets)
    return attend, convolve, chunks


def _fla_plan(chunks: Chunks) -> fla.FlaChunkPlan:
    return fla.FlaChunkPlan.build(chunks.slots, chunks.starts, chunks.lengths)


def _reference_chunks(
    inputs: DeltaInputs, weights: DeltaNetWeights, pool: torch.Tensor, plan: ReferenceChunkPlan
) -> torch.Tensor:
    q, k, v, a, b = inputs
    g, beta = rule.delta_gates(a, b, weights.A_log, weights.dt_bias)
    return reference_rule.chunk_gated_delta_rule(q, k, v, g=g, beta=beta, pool=pool, plan=plan)


def _reference_chunk_plan(chunks: Chunks) -> ReferenceChunkPlan:
    return ReferenceChunkPlan.build(chunks.slots, chunks.starts, chunks.lengths)


def _attention_plan(
    batch: ModelInput, shape: KVShape, dtype: torch.dtype
) -> attention.TritonAttentionPlan:
    return attention.TritonAttentionPlan.build(batch, shape, dtype)


def kernel_operations(
    *,
    attend: AttentionBackend = "triton",
    chunks: ChunkBackend = "auto",
    step: StepBackend = "triton",
) -> Operations:
    """Choose kernels for everything, and which for attention and the two forms of the delta rule.

    Args:
        chunks: "auto" is FLA's chunked rule, and our recurrent one where all chunks are short.
    """
    steps: dict[StepBackend, tuple[DeltaRule, Callable[[Decodes], Any]]] = {
        "triton": (_by_lane(rule.gated_delta_step), _lane_plan),
        "fla": (_by_lane(fla.gated_delta_step), _lane_plan),
        "reference": (delta_step, slot_plan),
    }
    prompts: dict[
        ChunkBackend,
        tuple[DeltaRule, Callable[[Chunks], Any], Callable[[Chunks, int], conv.TritonConvPlan]],
    ] = {
        "auto": (_prompt_chunks, _prompt_plan, _prompt_conv_plan),
        "fla": (_prompt_chunks, _fla_plan, partial(_conv_plan, normed=True)),
        "reference": (_reference_chunks, _reference_chunk_plan, partial(_conv_plan, normed=False)),
    }
    attentions: dict[AttentionBackend, AttentionOperations] = {
        "triton": AttentionOperations(_attention_plan, attention.paged_attention),
        "flash": AttentionOperations(flash.FlashAttentionPlan.build, flash.paged_attention),
        "reference": REFERENCE_ATTENTION,
    }
    return Operations(
        graph_decode=attend != "reference" and step != "reference",
        products=SeparateProducts(
            linear=plain_linear,
            output_head=plain_output_head,
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
            conv_step=_conv_step,
            conv_chunks=_conv_chunks,
            conv_step_plan=_lane_plan,
            conv_chunk_plan=prompts[chunks][2],
            step=steps[step][0],
            step_plan=steps[step][1],
            chunks=prompts[chunks][0],
            chunk_plan=prompts[chunks][1],
        ),
        attention=attentions[attend],
        inputs_adjacent=True,
        few_rows=SmallBatchProducts(),
        max_few_rows=_FEW_ROWS,
        graph_chunks=_graph_chunks if chunks == "auto" and attend == "triton" else None,
    )
