"""Pieces carried out on tensors: a target from its sources, and a source back from its targets."""

from collections.abc import Callable, Iterable

import torch

from minivllm_engine.checkpoint.rules import Transform
from minivllm_engine.conversion.plan import Piece, Rows


def view_rows(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The rows as a view [groups, size, *rest] of `tensor`, which may be written through it."""
    step = tensor.stride(0)
    return tensor.as_strided(
        (rows.groups, rows.size, *tensor.shape[1:]),
        (rows.stride * step, step, *tensor.stride()[1:]),
        tensor.storage_offset() + rows.offset * step,
    )


def is_whole(piece: Piece, source: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Is the piece all of its source and all of its target, as it is?"""
    rows = Rows(0, 1, shape[0], shape[0])
    return (
        piece.transform == "copy"
        and tuple(source.shape) == shape
        and piece.source_rows == rows
        and piece.target_rows == rows
    )


def assemble(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    pieces: Iterable[Piece],
    read: Callable[[str], torch.Tensor],
) -> torch.Tensor:
    """A target tensor, contiguous, in `dtype`.

    Args:
        pieces: those of this target.
        read: gives a source tensor by name.
    """
    out: torch.Tensor | None = None
    for piece in pieces:
        source = read(piece.source)
        if is_whole(piece, source, shape) and source.dtype == dtype:
            return source.contiguous()
        if out is None:
            out = torch.empty(shape, dtype=dtype)
        view = view_rows(out, piece.target_rows)
        view.copy_(as_target(piece, source).reshape(view.shape))
    assert out is not None, "a target has at least one piece"
    return out


def as_target(piece: Piece, source: torch.Tensor) -> torch.Tensor:
    """The values that a piece gives, before they are cast: [groups, size, *rest] as the source has them."""
    return forward(view_rows(source, piece.source_rows), piece.transform)


def forward(rows: torch.Tensor, transform: Transform) -> torch.Tensor:
    """Values of a source [groups, size, *rest] as a target has them, before its dtype."""
    if transform == "minus_one":
        wide = rows.dtype if rows.dtype == torch.float64 else torch.float32
        return rows.to(wide) - 1
    if transform == "conv_axis":
        return rows.transpose(-1, -2)
    return rows


def backward(rows: torch.Tensor, transform: Transform) -> torch.Tensor:
    """The inverse of `forward`, up to rounding."""
    if transform == "minus_one":
        return rows.to(torch.float64) + 1
    if transform == "conv_axis":
        return rows.transpose(-1, -2)
    return rows
