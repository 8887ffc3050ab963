"""Root-mean-square norms: the zero-centred one, and the gated one of DeltaNet, which is not."""

from functools import cached_property

import torch
from torch import nn

from minivllm_engine.ops.fused.reference import gated_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight). The weight must not change once the norm has been used."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = torch.tensor([eps], device=device)
        self.weight = nn.Parameter(
            torch.empty(size, dtype=dtype, device=device), requires_grad=False
        )

    @cached_property
    def _scale(self) -> torch.Tensor:
        return 1 + self.weight.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size]."""
        return rms_norm(x, self._scale, self.eps)


class GatedRMSNorm(nn.Module):
    """(weight * x / rms(x)) * silu(gate): the weight is plain, and the gate comes after the norm.

    The weight is fp32 whatever the model's dtype; x / rms(x) is rounded to that dtype before it.
    """

    def __init__(self, size: int, *, eps: float, device: torch.device) -> None:
        super().__init__()
        self.eps = torch.tensor([eps], device=device)
        self.weight = nn.Parameter(
            torch.empty(size, dtype=torch.float32, device=device), requires_grad=False
        )

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x, gate: [..., size]."""
        return gated_rms_norm(x, gate, self.weight, self.eps)
