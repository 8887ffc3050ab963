"""Gated DeltaNet: linear attention with a matrix state, written by the delta rule and decayed by a gate."""

from functools import cached_property, partial

import torch
from torch import nn

from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.models.layers.step_plan import DeltaPlan, StepPlan
from minivllm_engine.models.layers.weight import GatedRMSNorm, weight_matrix
from minivllm_engine.ops.operations import DeltaInputs, DeltaNetWeights, Operations
from minivllm_engine.ops.products import Norm, Residual

# Of some rows: what is convolved, a and b; and the pools of convolution and states.
_Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_Pools = tuple[torch.Tensor, torch.Tensor]


class GatedDeltaNet(nn.Module):
    """One DeltaNet layer. H key heads of size K, HV value heads of size V, W the width of the convolution.

    All projections of the input are one matrix with the columns [q | k | v | z | b | a]. What decides the
    decay (A_log, dt_bias) and the norm's weight are fp32 whatever the model's dtype.
    """

    MATRICES = ("in_proj", "out_proj")

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
        self.num_heads, self.num_value_heads = (
            config.linear_num_key_heads,
            config.linear_num_value_heads,
        )
        self.key_dim, self.value_dim = config.key_dim, config.value_dim
        self.conv_dim = config.conv_dim
        hidden, heads = config.hidden_size, self.num_value_heads

        weight = partial(weight_matrix, operations=operations, dtype=dtype, device=device)

        def parameter(*shape: int, dtype: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        width = self.conv_dim + self.value_dim + 2 * heads
        self.in_proj = weight(hidden, width)
        self.conv = parameter(config.linear_conv_kernel_dim, self.conv_dim)
        self.A_log = parameter(heads, dtype=torch.float32)
        self.dt_bias = parameter(heads, dtype=torch.float32)
        self.norm = GatedRMSNorm(
            config.linear_value_head_dim, eps=config.rms_norm_eps, device=device
        )
        self.out_proj = weight(self.value_dim, hidden)

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
        self,
        residual: Residual,
        norm: Norm,
        conv_pool: torch.Tensor,
        state_pool: torch.Tensor,
        plan: StepPlan,
    ) -> None:
        """Advance the states of the step's sequences in the pools, read them, and add what they give.

        Args:
            norm: before the layer.
            conv_pool: [num_slots, conv_dim, W - 1] of this layer.
            state_pool: [num_slots, HV, V, K] of this layer.
            plan: of this step.
        """
        heads, products = self.num_value_heads, plan.products
        sizes = [self.conv_dim, self.value_dim, heads, heads]
        projected = products.norm_linear(residual, norm, self.in_proj)
        raw, z, b, a = torch.split_with_sizes(projected, sizes, dim=-1)
        pools, cut = (conv_pool, state_pool), plan.num_decodes
        if plan.prefill is None:
            out = self._decode((raw, a, b), pools, plan.decode)
        elif plan.decode is None:
            out = self._prefill((raw, a, b), pools, plan.prefill)
        else:
            decoded = self._decode((raw[:cut], a[:cut], b[:cut]), pools, plan.decode)
            rest = self._prefill((raw[cut:], a[cut:], b[cut:]), pools, plan.prefill)
            out = torch.cat((decoded, rest))
        gate, own = z.view(out.shape), self.norm
        products.gated_norm_linear_add(residual, out, gate, own.weight, own.eps, self.out_proj)

    def _decode(self, columns: _Columns, pools: _Pools, plan: DeltaPlan | None) -> torch.Tensor:
        assert plan is not None
        (raw, a, b), (conv_pool, state_pool) = columns, pools
        weights, ops = self._weights, self.operations.delta_net
        heads = weights.heads(ops.conv_step(raw, conv_pool, weights, plan.conv))
        return ops.step(DeltaInputs(*heads, a, b), weights, state_pool, plan.rule)

    def _prefill(self, columns: _Columns, pools: _Pools, plan: DeltaPlan) -> torch.Tensor:
        (raw, a, b), (conv_pool, state_pool) = columns, pools
        weights, ops = self._weights, self.operations.delta_net
        heads = ops.conv_chunks(raw, conv_pool, weights, plan.conv)
        return ops.chunks(DeltaInputs(*heads, a, b), weights, state_pool, plan.rule)

    @cached_property
    def _weights(self) -> DeltaNetWeights:
        return DeltaNetWeights(
            conv_weight=self.conv,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            num_heads=self.num_heads,
            num_value_heads=self.num_value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
        )
