"""The memory of a projection's weight."""

import torch
from torch import nn


def weight_matrix(
    num_in: int, num_out: int, *, dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """[num_in, num_out], not initialised, to be multiplied from the left.

    A CPU's library is quickest where outputs lie side by side, see ops/linear.py; a GPU's where inputs
    do, as in checkpoints.
    """
    if device.type == "cpu":
        values = torch.empty(num_in, num_out, dtype=dtype, device=device)
    else:
        values = torch.empty(num_out, num_in, dtype=dtype, device=device).t()
    return nn.Parameter(values, requires_grad=False)
