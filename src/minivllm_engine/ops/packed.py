"""Weights that oneDNN has laid out for a CPU's vector units, and products with them.

A row's bits are the same for any number of rows, which the products of ops/products.py reach by padding few
rows to two (a head's to sixteen) at two to four times the time. oneDNN adds up to 1,024 inputs in one order
whatever the number of rows; of more, the order depends on it. So a weight is cut along its inputs into
pieces of that many, whose products are added one after the other. Measured with oneDNN of torch 2.13 under
AVX2, AVX-512 and AMX; that it holds on the processor at hand is tried for each shape before it is used.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minivllm_engine.memory.sizes import LEAST_PACKED, X86

_MOST_INPUTS = 1024
_TRIED_ROWS = (2, 7, 16, 40)
# torch has no stubs for these.
_onednn: Any = torch.ops.mkldnn


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [num_in, num_out] in pieces along its inputs, each laid out by oneDNN.

    Attributes:
        nbytes: of all pieces.
    """

    pieces: tuple[torch.Tensor, ...]
    num_in: int
    num_out: int
    nbytes: int

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x @ weight + bias: [num_rows, num_out], for x [num_rows, num_in]."""
        if len(self.pieces) == 1:
            return _product(x, self.pieces[0], bias)
        parts = zip(torch.split(x, _MOST_INPUTS, dim=1), self.pieces, strict=True)
        first, piece = next(parts)
        # Parts are rounded to the dtype of x; their sum is rounded once.
        total = _product(first, piece, bias).float()
        for part, piece in parts:
            total += _product(part, piece, None)
        return total.to(x.dtype)


class Packing:
    """Packs weights on a CPU whose library keeps a row's bits, and leaves the others as they are."""

    def __init__(self) -> None:
        self._tried: dict[tuple[int, int, torch.dtype], bool] = {}

    def suits(self, num_in: int, num_out: int, dtype: torch.dtype) -> bool:
        """Say whether a weight of this size is worth packing and the library can."""
        return num_in * num_out >= LEAST_PACKED and _can_compute(dtype)

    def pack(self, weight: torch.Tensor) -> PackedWeight | None:
        """Pack `weight` [num_in, num_out], or return None where a row's bits would depend on others."""
        num_in, num_out = weight.shape
        pieces = []
        for rows in torch.split(weight, _MOST_INPUTS):
            piece = _onednn._reorder_linear_weight(rows.t().contiguous(), None)
            key = (rows.shape[0], num_out, weight.dtype)
            if key not in self._tried:
                self._tried[key] = _rows_agree(piece, rows.shape[0], weight.dtype)
            if not self._tried[key]:
                return None
            pieces.append(piece)
        return PackedWeight(tuple(pieces), num_in, num_out, weight.nbytes)


def _rows_agree(piece: torch.Tensor, num_in: int, dtype: torch.dtype) -> bool:
    """Say whether the first row gets the same bits alone and with others."""
    x = torch.randn(_TRIED_ROWS[-1], num_in, generator=torch.Generator().manual_seed(0)).to(dtype)
    alone = [_product(x[:1], piece, None), _product(x[1:2], piece, None)]
    return all(
        torch.equal(_product(x[:rows], piece, None)[:2], torch.cat(alone)) for rows in _TRIED_ROWS
    )


def _product(x: torch.Tensor, piece: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    nothing: Sequence[float] = []
    result: torch.Tensor = _onednn._linear_pointwise(x, piece, bias, "none", nothing, "")
    return result


def _can_compute(dtype: torch.dtype) -> bool:
    # Elsewhere torch has other libraries behind the same calls.
    if platform.machine() not in X86 or not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(_onednn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
