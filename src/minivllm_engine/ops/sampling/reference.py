"""The argmax in plain PyTorch."""

import torch

from minivllm_engine.tensors.device_copy import fp32


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the argmax of each row, and whether the row can be trusted.

    Of equal logits the one with the smallest id wins. NaN counts as 0, infinities as the largest fp32.

    Args:
        logits: [N, vocab], any float dtype.

    Returns:
        token_ids [N] int64, valid ids also where a row is non-finite, and alive [N] bool: are the logits
        finite, and, if there are several, not all equal?
    """
    numbers = fp32(logits)
    token_ids = numbers.nan_to_num().argmax(dim=-1)
    alive = numbers.isfinite().all(dim=-1)
    if logits.shape[-1] > 1:
        alive &= numbers.amax(dim=-1) != numbers.amin(dim=-1)
    return token_ids, alive
