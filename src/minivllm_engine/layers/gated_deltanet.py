"""Gated DeltaNet: linear attention with a matrix state, written by the delta rule and decayed by a gate."""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import nn

from minivllm_engine.layers.linear import linear
from minivllm_engine.layers.norm import GatedRMSNorm
from minivllm_engine.layers.step_plan import StepPlan
from minivllm_engine.model_config import ModelConfig
from minivllm_engine.ops.causal_conv.reference import causal_conv_prefill, causal_conv_step
from minivllm_engine.ops.gated_delta.reference import chunk_gated_delta_rule, gated_delta_step


class GatedDeltaNet(nn.Module):
    """One DeltaNet layer. H key heads of size K, HV value heads of size V, W taps of convolution.

    All projections of the input are one matrix with the columns [q | k | v | z | b | a]. What decides the
    decay (A_log, dt_bias) and the norm's weight are fp32 whatever the model's dtype.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.num_heads, self.num_value_heads = (
            config.linear_num_key_heads,
            config.linear_num_value_heads,
        )
        self.key_dim, self.value_dim = config.key_dim, config.value_dim
        self.conv_dim = config.conv_dim
        hidden, heads = config.hidden_size, self.num_value_heads

        def parameter(*shape: int, dtype: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.in_proj = parameter(hidden, self.conv_dim + self.value_dim + 2 * heads)
        self.conv = parameter(config.linear_conv_kernel_dim, self.conv_dim)
        self.A_log = parameter(heads, dtype=torch.float32)
        self.dt_bias = parameter(heads, dtype=torch.float32)
        self.norm = GatedRMSNorm(
            config.linear_value_head_dim, eps=config.rms_norm_eps, device=device
        )
        self.out_proj = parameter(self.value_dim, hidden)

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        heads = self.num_value_heads
        sizes = [self.conv_dim, self.value_dim, heads, heads]
        qkv, z, b, a = torch.split_with_sizes(self.in_proj.t(), sizes)
        return {
            "in_proj_qkv.weight": qkv,
            "in_proj_z.weight": z,
            "in_proj_b.weight": b,
            "in_proj_a.weight": a,
            "conv1d.weight": self.conv.t().unsqueeze(1),
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "norm.weight": self.norm.weight,
            "out_proj.weight": self.out_proj.t(),
        }

    def forward(
        self, x: torch.Tensor, conv_pool: torch.Tensor, state_pool: torch.Tensor, plan: StepPlan
    ) -> torch.Tensor:
        """Advance the states of the step's sequences in the pools, and read them.

        Args:
            x: [num_tokens, hidden_size].
            conv_pool: [num_slots, conv_dim, W - 1] of this layer.
            state_pool: [num_slots, HV, V, K] of this layer.
            plan: of this step.
        """
        heads = self.num_value_heads
        sizes = [self.conv_dim, self.value_dim, heads, heads]
        raw, z, b, a = torch.split_with_sizes(linear(x, self.in_proj), sizes, dim=-1)
        beta = torch.sigmoid(b)
        # In fp64 because the last bit of an fp32 softplus depends on where in a batch the number stands.
        negative_a, dt_bias = self._gate
        g = negative_a * F.softplus(a.double() + dt_bias)
        pools = conv_pool, state_pool
        if plan.prefill is None:
            out = self._decode(raw, g, beta, *pools, plan)
        elif plan.decode is None:
            out = self._prefill(raw, g, beta, *pools, plan)
        else:
            cut = plan.num_decodes
            decoded = self._decode(raw[:cut], g[:cut], beta[:cut], *pools, plan)
            out = torch.cat((decoded, self._prefill(raw[cut:], g[cut:], beta[cut:], *pools, plan)))
        normed = self.norm(out, z.reshape(out.shape)).flatten(1)
        return linear(normed, self.out_proj)

    def _decode(
        self,
        raw: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        conv_pool: torch.Tensor,
        state_pool: torch.Tensor,
        plan: StepPlan,
    ) -> torch.Tensor:
        assert plan.decode is not None
        if plan.decode.fresh is not None:
            conv_pool.index_fill_(0, plan.decode.fresh, 0)
            state_pool.index_fill_(0, plan.decode.fresh, 0)
        q, k, v = self._heads(causal_conv_step(raw, conv_pool, self._taps, plan.decode.slots))
        return gated_delta_step(q, k, v, g=g, beta=beta, pool=state_pool, plan=plan.decode)

    def _prefill(
        self,
        raw: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        conv_pool: torch.Tensor,
        state_pool: torch.Tensor,
        plan: StepPlan,
    ) -> torch.Tensor:
        assert plan.prefill is not None
        q, k, v = self._heads(causal_conv_prefill(raw, conv_pool, self._taps, plan.prefill.conv))
        chunks = plan.prefill.chunks
        return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, pool=state_pool, plan=chunks)

    @cached_property
    def _taps(self) -> tuple[torch.Tensor, ...]:
        return self.conv.float().unbind(0)

    @cached_property
    def _gate(self) -> tuple[torch.Tensor, torch.Tensor]:
        """-A and dt_bias, in fp64."""
        return -self.A_log.double().exp(), self.dt_bias.double()

    def _heads(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = [self.key_dim, self.key_dim, self.value_dim]
        q, k, v = torch.split_with_sizes(convolved, sizes, dim=-1)
        rows = convolved.shape[0]
        return (
            q.view(rows, self.num_heads, -1),
            k.view(rows, self.num_heads, -1),
            v.view(rows, self.num_value_heads, -1),
        )
