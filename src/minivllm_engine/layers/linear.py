"""Matrix products whose rows do not depend on how many other rows there are.

Libraries compute products of few rows with other code, and other roundings, than those of many. A
sequence would then get other logits in a batch than alone.
"""

import torch
import torch.nn.functional as F

# Measured with MKL: from this many rows on, the bits of a row stay the same (for a weight stored as
# [in, out] with up to 448 inputs at any number of rows, beyond that up to 128 rows).
_MIN_ROWS = 2
_MIN_ROWS_TRANSPOSED = 16


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight + bias.

    Args:
        x: [num_rows, in].
        weight: [in, out]: up to a third faster for few rows than the [out, in] of checkpoints.
        bias: [out].
    """
    if x.shape[0] >= _MIN_ROWS:
        return F.linear(x, weight.t(), bias)
    return F.linear(_padded(x, _MIN_ROWS), weight.t(), bias)[: x.shape[0]]


def output_head(x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """Logits: x [num_rows, hidden] times an embedding [vocab, hidden], which its lookup wants so."""
    if x.shape[0] >= _MIN_ROWS_TRANSPOSED:
        return F.linear(x, embedding)
    return F.linear(_padded(x, _MIN_ROWS_TRANSPOSED), embedding)[: x.shape[0]]


def _padded(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    if x.shape[0] == 1:
        return x.expand(num_rows, -1)
    return F.pad(x, (0, 0, 0, num_rows - x.shape[0]))
