"""Root-mean-square norms: the zero-centred one, and the gated one of DeltaNet, which is not."""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import nn

from minivllm_engine.ops.precision import cast, fp32


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """x / rms(x) * scale over the last dimension of x, in fp32, rounded once at the end.

    eps: [1] fp32, added to the mean square.
    """
    return cast(x.mul(_inverse_rms(x, eps)).mul_(scale), x.dtype)


def _inverse_rms(x: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """[..., 1] fp32."""
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()


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
        normed = cast(x.mul(_inverse_rms(x, self.eps)), x.dtype)
        return cast(F.silu(fp32(gate)).mul_(self.weight).mul_(normed), x.dtype)
