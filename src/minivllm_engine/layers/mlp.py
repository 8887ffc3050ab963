"""The SwiGLU feed-forward block."""

import torch
from torch import nn

from minivllm_engine.layers.weight import weight_matrix
from minivllm_engine.model_config import ModelConfig
from minivllm_engine.ops.operations import Operations


class MLP(nn.Module):
    """down(silu(gate x) * up x). Weights are [in, out], gate and up in one matrix."""

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
        hidden, wide = config.hidden_size, config.intermediate_size
        self.gate_up = weight_matrix(hidden, 2 * wide, dtype=dtype, device=device)
        self.down = weight_matrix(wide, hidden, dtype=dtype, device=device)

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        gate, up = self.gate_up.t().chunk(2)
        return {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": self.down.t()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size]."""
        ops = self.operations
        return ops.linear(ops.silu_mul(ops.linear(x, self.gate_up)), self.down)
