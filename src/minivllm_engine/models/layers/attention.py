"""Grouped-query attention with norms on queries and keys and a sigmoid gate on the output."""

from functools import cached_property, partial

import torch
from torch import nn

from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.models.layers.step_plan import StepPlan
from minivllm_engine.models.layers.weight import weight_matrix
from minivllm_engine.ops.operations import Operations
from minivllm_engine.ops.products import Norm, Residual


class GatedAttention(nn.Module):
    """One attention layer. H query heads, G key/value heads, d the head's size.

    All projections of the input are one matrix with the columns [query | key | gate | value], so that
    queries and keys, which are normed and rotated alike, lie side by side.
    """

    MATRICES = ("in_proj", "o_proj")

    def __init__(
        self,
        config: ModelConfig,
        operations: Operations,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.operations = operations
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.eps = torch.tensor([config.rms_norm_eps], device=device)
        hidden = config.hidden_size
        width = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim

        weight = partial(weight_matrix, operations=operations, dtype=dtype, device=device)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.in_proj = weight(hidden, width)
        self.o_proj = weight(self.num_heads * self.head_dim, hidden)
        self.in_bias = parameter(width) if config.attention_bias else None
        self.o_bias = parameter(hidden) if config.attention_bias else None
        self.q_norm, self.k_norm = parameter(self.head_dim), parameter(self.head_dim)

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Give views in the checkpoint's layout, in which q_proj holds [query | gate] for each head."""
        views: dict[str, torch.Tensor] = {
            "o_proj.weight": self.o_proj.t(),
            "q_norm.weight": self.q_norm,
            "k_norm.weight": self.k_norm,
        }
        sources = [("weight", self.in_proj.t())]
        if self.in_bias is not None and self.o_bias is not None:
            views["o_proj.bias"] = self.o_bias
            sources.append(("bias", self.in_bias))
        for kind, source in sources:
            heads = source.view(-1, self.head_dim, *source.shape[1:])
            query, key, gate, value = torch.split_with_sizes(
                heads, [self.num_heads, self.num_kv_heads] * 2
            )
            # A query head and its gate are the same distance apart for all heads: one strided view.
            distance = gate.storage_offset() - query.storage_offset()
            strides = (heads.stride(0), distance, *heads.stride()[1:])
            views[f"q_proj.{kind}"] = heads.as_strided(
                (self.num_heads, 2, *heads.shape[1:]), strides
            )
            views[f"k_proj.{kind}"], views[f"v_proj.{kind}"] = key, value
        return views

    def forward(
        self,
        residual: Residual,
        norm: Norm,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: StepPlan,
    ) -> None:
        """Write the step's keys and values into the cache, attend, and add what that gives.

        Args:
            norm: before the layer.
            keys, values: [num_blocks, block_size, G, d], the cache of this layer.
            plan: of this step.
        """
        num_rotated, ops = self.num_heads + self.num_kv_heads, self.operations
        projected = plan.products.norm_linear(residual, norm, self.in_proj, self.in_bias)
        query_key, gate, value = torch.split_with_sizes(
            projected.view(projected.shape[0], -1, self.head_dim),
            [num_rotated, self.num_heads, self.num_kv_heads],
            dim=1,
        )
        query = ops.norm_rotate_write(
            query_key,
            value,
            scale=self._scale,
            eps=self.eps,
            cos=plan.cos,
            sin=plan.sin,
            keys=keys,
            values=values,
            kv_slots=plan.kv_slots,
        )
        attended = ops.attention.attend(query, keys, values, plan.attention)
        plan.products.sigmoid_gate_linear_add(residual, attended, gate, self.o_proj, self.o_bias)

    @cached_property
    def _scale(self) -> torch.Tensor:
        """1 + weight of the query and key norms: [H + G, d] fp32."""
        query = self.q_norm.expand(self.num_heads, -1)
        return 1 + torch.cat((query, self.k_norm.expand(self.num_kv_heads, -1))).float()
