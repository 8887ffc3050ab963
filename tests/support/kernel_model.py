"""The decoder put together from kernels: what the operations are for, and proof that they fit together.

Products, the embedding and the chunked delta rule, which FLA computes on a card, are the reference's.
"""

import torch
import torch.nn.functional as F

from minivllm_engine.cache_pool import CachePool
from minivllm_engine.layers.attention import GatedAttention
from minivllm_engine.layers.gated_deltanet import GatedDeltaNet
from minivllm_engine.layers.linear import linear, output_head
from minivllm_engine.layers.rotary import rotary_cos_sin
from minivllm_engine.model_input import ModelInput
from minivllm_engine.models.miniqwen import MiniQwenForCausalLM
from minivllm_engine.ops.attention.reference import KVShape
from minivllm_engine.ops.attention.triton import AttentionPlan, paged_attention
from minivllm_engine.ops.causal_conv.triton import ConvPlan, causal_conv_prefill, causal_conv_step
from minivllm_engine.ops.fused.triton import (
    add_rms_norm,
    gated_rms_norm,
    norm_rotate_write,
    rms_norm,
    sigmoid_mul,
    silu_mul,
)
from minivllm_engine.ops.gated_delta.plan import ChunkPlan
from minivllm_engine.ops.gated_delta.reference import chunk_gated_delta_rule
from minivllm_engine.ops.gated_delta.triton import delta_gates, gated_delta_step


class KernelModel:
    """Takes what MiniQwenForCausalLM takes, computes with its weights, and gives what it gives."""

    def __init__(self, model: MiniQwenForCausalLM) -> None:
        self.model, self.config = model, model.config
        self.dtype, self.device = model.dtype, model.device

    def __call__(self, batch: ModelInput, pool: CachePool) -> torch.Tensor:
        x = F.embedding(batch.token_ids, self.model.embedding)
        layers = list(self.model.layers)
        norms = [layer.input_norm for layer in layers[1:]] + [self.model.norm]
        normed = rms_norm(x, layers[0].input_norm._scale, layers[0].input_norm.eps)
        for layer, next_norm in zip(layers, norms, strict=True):
            mix = _attend if isinstance(layer.mixer, GatedAttention) else _mix
            mixed = mix(layer.mixer, normed, pool, layer.rank, batch, self.model)
            normed = add_rms_norm(mixed, x, layer.mlp_norm._scale, layer.mlp_norm.eps)
            out = linear(silu_mul(linear(normed, layer.mlp.gate_up)), layer.mlp.down)
            normed = add_rms_norm(out, x, next_norm._scale, next_norm.eps)
        return output_head(normed.index_select(0, batch.logits_rows), self.model.head)


def _attend(
    layer: GatedAttention,
    x: torch.Tensor,
    pool: CachePool,
    rank: int,
    batch: ModelInput,
    model: MiniQwenForCausalLM,
) -> torch.Tensor:
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    keys, values = pool.keys[rank], pool.values[rank]
    factor = model.config.rope.attention_factor
    cos, sin = rotary_cos_sin(batch.positions, model.frequencies, factor, model.dtype)
    projected = linear(x, layer.in_proj).unflatten(1, (-1, layer.head_dim))
    query_key, gate, value = projected.split([heads + kv_heads, heads, kv_heads], dim=1)
    query = norm_rotate_write(
        query_key,
        value,
        scale=layer._scale,
        eps=layer.eps,
        cos=cos,
        sin=sin,
        keys=keys,
        values=values,
        kv_slots=batch.kv_slots,
    )
    shape = KVShape(pool.block_size, heads, kv_heads, layer.head_dim)
    plan = AttentionPlan.build(batch, shape, model.dtype)
    attended = paged_attention(query, keys, values, plan)
    return linear(sigmoid_mul(attended, gate).flatten(1), layer.o_proj)


def _mix(
    layer: GatedDeltaNet,
    x: torch.Tensor,
    pool: CachePool,
    rank: int,
    batch: ModelInput,
    model: MiniQwenForCausalLM,
) -> torch.Tensor:
    heads, cut = layer.num_value_heads, batch.num_decodes
    conv, states = pool.conv[rank], pool.recurrent[rank]
    sizes = [layer.conv_dim, layer.value_dim, heads, heads]
    raw, z, b, a = linear(x, layer.in_proj).split(sizes, dim=-1)
    gates = {"A_log": layer.A_log, "dt_bias": layer.dt_bias}
    parts = []
    if cut:
        where = {"slots": batch.slots[:cut], "positions": batch.positions[:cut]}
        q, k, v = layer._heads(causal_conv_step(raw[:cut], conv, layer.conv, **where))
        parts.append(gated_delta_step(q, k, v, a=a[:cut], b=b[:cut], **gates, pool=states, **where))
    if cut < len(batch.lengths):
        sequences = batch.slots[cut:], batch.starts[cut:], batch.lengths[cut:]
        plan = ConvPlan.build(*sequences)
        q, k, v = layer._heads(causal_conv_prefill(raw[cut:], conv, layer.conv, plan))
        g, beta = delta_gates(a[cut:], b[cut:], **gates)
        chunks = ChunkPlan.build(*sequences)
        parts.append(chunk_gated_delta_rule(q, k, v, g=g, beta=beta, pool=states, plan=chunks))
    out = torch.cat(parts)
    normed = gated_rms_norm(out, z.unflatten(1, (heads, -1)), layer.norm.weight, layer.norm.eps)
    return linear(normed.flatten(1), layer.out_proj)
