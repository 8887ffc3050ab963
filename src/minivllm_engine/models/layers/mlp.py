"""The SwiGLU feed-forward block."""

from functools import partial

import torch
from torch import nn

from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.models.layers.weight import weight_matrix
from minivllm_engine.ops.operations import Operations
from minivllm_engine.ops.products import Norm, Products, Residual


class MLP(nn.Module):
    """down(silu(gate x) * up x). Weights are [in, out], gate and up in one matrix."""

    MATRICES = ("gate_up", "down")

    def __init__(
        self,
        config: ModelConfig,
        operations: Operations,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        weight = partial(weight_matrix, operations=operations, dtype=dtype, device=device)

        self.gate_up = weight(hidden, 2 * wide)
        self.down = weight(wide, hidden)

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        gate, up = self.gate_up.t().chunk(2)
        return {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": self.down.t()}

    def forward(self, residual: Residual, norm: Norm, products: Products) -> None:
        """Add the block's output to the residual stream."""
        activated = products.norm_swiglu(residual, norm, self.gate_up)
        products.linear_add(residual, activated, self.down)
