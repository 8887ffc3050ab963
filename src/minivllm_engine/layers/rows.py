"""Padding of short batches, so that a row's result hardly depends on how many others there are."""

import torch
import torch.nn.functional as F

# Matrix products of few rows go through other code, with other roundings, than those of many. From
# here on they are the same to the last bit for inner sizes up to 128, and costs have hardly grown.
_MIN_ROWS = 8


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """x [num_rows, width], with zero rows below it where it has less than 8."""
    missing = _MIN_ROWS - x.shape[0]
    return F.pad(x, (0, 0, 0, missing)) if missing > 0 else x
