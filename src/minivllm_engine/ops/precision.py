"""Casts that cost nothing where there is nothing to cast: a step makes hundreds of them."""

import torch


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def fp32(x: torch.Tensor) -> torch.Tensor:
    return cast(x, torch.float32)
