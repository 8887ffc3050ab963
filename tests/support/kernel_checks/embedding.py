"""Rows of an embedding for tokens that lie in two places."""

import torch

from minivllm_engine.ops.embedding import reference, triton
from support.kernel_checks import NAN, preceded, same_bits


def check_embed(device: torch.device, dtype: torch.dtype, num_rows: int, hidden: int) -> None:
    """Tokens of their own and sampled ones in turn; what is not to be read would give a row of NaN."""
    torch.manual_seed(num_rows)
    vocab = 50
    memory = torch.full((vocab + 2, hidden), NAN, dtype=dtype)
    memory[1:-1] = torch.randn(vocab, hidden)
    ids = torch.randint(0, vocab, (num_rows,), dtype=torch.int32)
    sampled = torch.randint(0, vocab, (num_rows + 3,))
    sources = torch.randint(0, num_rows + 3, (num_rows,), dtype=torch.int32)
    own = torch.arange(num_rows) % 3 == 1
    sources[own] = -1
    sources[0] = 0
    used = sources[~own].long()
    expected = reference.embed(ids, sources, sampled, memory[1:-1])
    ids[~own] = vocab
    unused = torch.ones_like(sampled, dtype=torch.bool).index_fill(0, used, False)
    sampled[unused] = vocab
    assert expected.isfinite().all()
    there = memory.to(device)[1:-1]
    # Before the sampled tokens lies what -1 must not read.
    out = triton.embed(
        ids.to(device), sources.to(device), preceded(sampled.to(device), vocab), there
    )
    assert out.dtype == dtype and out.shape == (num_rows, hidden)
    assert same_bits(out, expected)
    by_ids = there.index_select(0, ids.to(device)[own.to(device)])
    assert same_bits(by_ids, expected[own])
