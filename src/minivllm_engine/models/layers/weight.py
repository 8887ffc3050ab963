"""The weights of projections and of root-mean-square norms. The operations that use them are in ops."""

from functools import cached_property

import torch
from torch import nn


def weight_matrix(
    num_in: int, num_out: int, *, inputs_adjacent: bool, dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """[num_in, num_out], not initialised, to be multiplied from the left.

    inputs_adjacent: how it lies in memory, see ops/operations.py.
    """
    if inputs_adjacent:
        values = torch.empty(num_out, num_in, dtype=dtype, device=device).t()
    else:
        values = torch.empty(num_in, num_out, dtype=dtype, device=device)
    return nn.Parameter(values, requires_grad=False)


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
