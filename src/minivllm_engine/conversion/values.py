"""What is looked at in the values of a tensor: are they finite, and what did a cast cost."""

from collections.abc import Iterator

import torch

# Elements looked at in one go: bounds the memory that this takes.
_CHUNK = 1 << 18

# Precision and range in one number each: a cast to a type of which neither is smaller loses nothing.
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_EXPONENTS = {torch.float64: 11, torch.float32: 8, torch.float16: 5, torch.bfloat16: 8}


def count_non_finite(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """How many values are NaN or infinite.

    Args:
        dtype: the type that they are looked at in, by default their own, or fp32 for fp64, as no model
            computes in anything wider.
    """
    if dtype is None:
        dtype = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
    return sum(
        int((~part.isfinite()).sum())
        for part in (chunk.to(dtype) for (chunk,) in _chunks(tensor))
        if not torch.stack(torch.aminmax(part)).isfinite().all()
    )


def largest_finite(tensor: torch.Tensor) -> float:
    """The largest magnitude of a value that is finite."""
    return max(
        (float(part.abs().nan_to_num_(nan=0.0, posinf=0.0).max()) for (part,) in _chunks(tensor)),
        default=0.0,
    )


def is_held_by(value: float, dtype: torch.dtype) -> bool:
    """Is it finite in `dtype`, rounded as a cast rounds?"""
    return bool(torch.tensor(value, dtype=torch.float64).to(dtype).isfinite())


def is_lossy(before: torch.dtype, after: torch.dtype) -> bool:
    return _DIGITS[before] > _DIGITS[after] or _EXPONENTS[before] > _EXPONENTS[after]


def max_relative_error(before: torch.Tensor, after: torch.Tensor) -> float:
    """max |after - before| / |before| where `before` is not 0, of two tensors of one shape."""
    worst = 0.0
    wide = torch.float64 if torch.float64 in (before.dtype, after.dtype) else torch.float32
    for a, b in _chunks(before, after):
        exact = a.to(wide)
        # 0 stays 0 in every type: 0 / 0 is the only NaN.
        error = (b.to(wide) - exact).div_(exact).abs_().nan_to_num_(nan=0.0)
        worst = max(worst, float(error.max()))
    return worst


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    flat = [tensor.reshape(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), _CHUNK):
        yield tuple(tensor[start : start + _CHUNK] for tensor in flat)
