"""Matrix products whose rows do not depend on how many other rows there are.

Libraries compute products of few rows with other code, and other roundings, than those of many, so
that a sequence would get other logits in a batch than alone. Measured with MKL: a row's bits stay the
same from 2 rows on for a weight stored as [in, out] (with up to 448 inputs; with thousands, from 2 to
128 rows), from 16 rows on for one stored as [out, in].
"""

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight + bias.

    Args:
        x: [num_rows, in].
        weight: [in, out]: for few rows up to a third faster than the [out, in] of checkpoints.
        bias: [out].
    """
    if x.shape[0] == 1:
        return linear(x.expand(2, -1), weight, bias)[:1]
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def output_head(x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """Logits: x [num_rows, hidden] times an embedding [vocab, hidden], whose lookup wants it so."""
    num_rows = x.shape[0]
    if num_rows < 16:
        x = F.pad(x, (0, 0, 0, 16 - num_rows))
    return F.linear(x, embedding)[:num_rows]


def plain_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As `linear`, for a device whose library is to choose by the number of rows."""
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def plain_output_head(x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """As `output_head`, likewise."""
    return F.linear(x, embedding)
