"""Comparisons of kernels with the reference operations, on any device.

Each check draws its own inputs in the given dtype, runs the reference on the CPU and the kernel on `device`,
over memory that is NaN wherever nothing is to be read, and raises AssertionError where they differ. CI runs
them small in Triton's interpreter, `make test-gpu` larger on the card.
"""

import os
from typing import NamedTuple

import pytest
import torch

from minivllm_engine.ops.varlen import PackedSequences

pytest.importorskip("triton", reason="Triton is there for Linux only")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="with a card, tests/gpu compares")

NAN = float("nan")


class Tolerance(NamedTuple):
    rtol: float
    atol: float


# One rounding of the output, a little more where sums are taken in another order.
TOLERANCES = {
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(2e-3, 1e-3),
    torch.bfloat16: Tolerance(1.6e-2, 4e-3),
}


def rounds_as_torch(dtype: torch.dtype) -> bool:
    """The interpreter cuts fp32 off to get bf16, where torch and the card round."""
    return not (INTERPRETED and dtype == torch.bfloat16)


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    what: str,
    *,
    via: torch.dtype | None = None,
    size: float = 1,
) -> None:
    """Of one dtype, which decides how close.

    via: a coarser dtype that intermediate values were rounded to, and that so decides.
    size: of intermediate values, where they are larger than the results.
    """
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} instead of {expected.dtype}"
    rtol, atol = TOLERANCES[via or expected.dtype]
    torch.testing.assert_close(
        actual.cpu(), expected, rtol=rtol, atol=atol * size, msg=lambda text: f"{what}: {text}"
    )


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal, NaN included."""
    as_bytes = (x.cpu().contiguous().view(torch.uint8) for x in (actual, expected))
    return torch.equal(*as_bytes)


def random_rows(num_rows: int, *widths: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Normal numbers, as parts of wider rows: between them and around them is NaN."""
    rows = torch.full((num_rows, sum(widths) + 8 * (len(widths) + 1)), NAN, dtype=dtype)
    parts, at = [], 8
    for width in widths:
        part = rows[:, at : at + width]
        part.copy_(torch.randn(num_rows, width))
        parts.append(part)
        at += width + 8
    return tuple(parts)


def on_device(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a part of wider rows, which lies there as here: apart, with NaN in between."""
    base = part._base
    assert base is not None
    copied = base.to(device, copy=True)
    return copied.as_strided(part.shape, part.stride(), part.storage_offset())


def with_padding(sequences: PackedSequences) -> PackedSequences:
    """With tiles for two more programs, which are to do nothing, and so read nothing at index -1."""
    padding = torch.tensor([[-1, 0], [-1, 7]], dtype=torch.int32, device=sequences.tiles.device)
    return PackedSequences(
        bounds=preceded(sequences.bounds, 0),
        starts=preceded(sequences.starts, 0),
        tiles=torch.cat((sequences.tiles, padding)),
    )


def preceded(x: torch.Tensor, number: int) -> torch.Tensor:
    """x [n], in memory with a number before its first one: what a kernel sees that reads index -1."""
    return torch.cat((x.new_full((1,), number), x))[1:]
