"""Weights of the root-mean-square norms: the zero-centred one, and the gated one of DeltaNet, which is not.

The operations that use them are in ops/fused.
"""

from functools import cached_property

import torch
from torch import nn


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight). The weight must not change once the norm has been used."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = torch.tensor([eps], device=device)
        self.weight = nn.Parameter(
            torch.empty(size, dtype=dtype, device=device), requires_grad=False
        )

    @cached_property
    def scale(self) -> torch.Tensor:
        """1 + weight, fp32."""
        return 1 + self.weight.float()


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
