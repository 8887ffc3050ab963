"""The SwiGLU feed-forward block."""

import torch
from torch import nn

from minivllm_engine.layers.linear import linear
from minivllm_engine.model_config import ModelConfig
from minivllm_engine.ops.fused.reference import silu_mul


class MLP(nn.Module):
    """down(silu(gate x) * up x). Weights are [in, out], gate and up in one matrix."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.gate_up = parameter(hidden, 2 * wide)
        self.down = parameter(wide, hidden)

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        gate, up = self.gate_up.t().chunk(2)
        return {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": self.down.t()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size]."""
        return linear(silu_mul(linear(x, self.gate_up)), self.down)
