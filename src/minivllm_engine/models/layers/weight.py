"""The weights of projections and of root-mean-square norms. The operations that use them are in ops."""

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import nn

from minivllm_engine.ops.operations import Operations


def weight_matrix(
    num_in: int, num_out: int, *, operations: Operations, dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """Make a weight [num_in, num_out], not initialised, that lies in memory as `operations` want it."""
    if operations.are_inputs_adjacent(num_in, num_out, dtype):
        values = torch.empty(num_out, num_in, dtype=dtype, device=device).t()
    else:
        values = torch.empty(num_in, num_out, dtype=dtype, device=device)
    return nn.Parameter(values, requires_grad=False)


def pack_weights(module: nn.Module, names: Iterable[str], operations: Operations) -> None:
    """Replace weights [num_in, num_out] of a module by packed ones, where the operations pack them."""
    for name in names:
        weight = getattr(module, name)
        num_in, num_out = weight.shape
        packing = operations.packing
        if packing is None or not packing.suits(num_in, num_out, weight.dtype):
            continue
        packed = packing.pack(weight)
        delattr(module, name)
        # The products for weights that are not packed want the outputs of one input side by side.
        plain = nn.Parameter(weight.contiguous(), requires_grad=False) if packed is None else None
        setattr(module, name, packed or plain)


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
