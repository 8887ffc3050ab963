"""Embedding in plain PyTorch."""

import torch


def embed(
    token_ids: torch.Tensor, sources: torch.Tensor, sampled: torch.Tensor, embedding: torch.Tensor
) -> torch.Tensor:
    """Return the rows of an embedding for some tokens, of which some are among those that were sampled last.

    Args:
        token_ids: [n] integers.
        sources: [n] integers: where in `sampled` the token of each row is; negative: in `token_ids`.
        sampled: [any] integers.
        embedding: [vocab, hidden].

    Returns:
        [n, hidden].
    """
    known = sampled.index_select(0, sources.clamp(min=0))
    return embedding.index_select(0, torch.where(sources < 0, token_ids, known))
