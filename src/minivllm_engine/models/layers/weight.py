"""The memory of a projection's weight."""

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
