"""The SwiGLU feed-forward block."""

import torch
import torch.nn.functional as F
from torch import nn

from minivllm_engine.model_config import ModelConfig


class MLP(nn.Module):
    """down(silu(gate x) * up x), gate and up in one matrix."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        self.gate_up = nn.Parameter(
            torch.empty(2 * wide, hidden, dtype=dtype, device=device), requires_grad=False
        )
        self.down = nn.Parameter(
            torch.empty(hidden, wide, dtype=dtype, device=device), requires_grad=False
        )

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        gate, up = self.gate_up.chunk(2)
        return {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": self.down}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_rows, hidden_size]."""
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)
