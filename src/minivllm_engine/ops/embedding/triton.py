"""Embedding in Triton, in one kernel from where tokens are to the residual stream."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minivllm_engine.ops.device import launch_options

_BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["token_ids", "sources", "sampled"])
def _embed_kernel(
    token_ids,
    sources,
    sampled,
    embedding,
    out,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + row)
    own = tl.load(token_ids + row).to(tl.int64)
    known = tl.load(sampled + source, mask=source >= 0, other=0).to(tl.int64)
    token = tl.where(source < 0, own, known)
    numbers = tl.load(embedding + token * SIZE + columns, mask=columns < SIZE, other=0.0)
    tl.store(out + row * SIZE + columns, numbers, mask=columns < SIZE)


def embed(
    token_ids: torch.Tensor,
    sources: torch.Tensor,
    sampled: torch.Tensor,
    embedding: torch.Tensor,
    *,
    early: bool | None = None,
) -> torch.Tensor:
    """Return the rows of an embedding for some tokens, of which some are among those that were sampled last.

    All but `embedding` may have any integer dtype; all are contiguous.

    Args:
        token_ids: [n] integers.
        sources: [n] integers: where in `sampled` the token of each row is; negative: in `token_ids`.
        sampled: [any] integers.
        embedding: [vocab, hidden].
        early: start while the kernel before still runs; by default where the card can.

    Returns:
        [n, hidden].
    """
    num_rows, size = token_ids.shape[0], embedding.shape[1]
    out = embedding.new_empty(num_rows, size)
    _embed_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
        token_ids,
        sources,
        sampled,
        embedding,
        out,
        SIZE=size,
        BLOCK=min(_BLOCK, triton.next_power_of_2(size)),
        num_warps=4,
        **launch_options(early, embedding.device),
    )
    return out
