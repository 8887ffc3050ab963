"""Attention of prompts and chunks, a tile of queries a program."""

import torch
import triton
import triton.language as tl

from minivllm_engine.ops.attention.tiles import PrefillTile, padded_size, softmax_scale
from minivllm_engine.ops.attention.triton.attend import INTERPRETED, attend
from minivllm_engine.ops.varlen import PackedSequences


@triton.jit(
    do_not_specialize=["table_row"],
    do_not_specialize_on_alignment=["tables", "bounds", "starts", "tiles"],
)
def _prefill_kernel(
    q,
    keys,
    values,
    out,
    tables,
    bounds,
    starts,
    tiles,
    q_row,
    table_row,
    scale,
    G: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles + 2 * tile)
    if seq < 0:
        return
    first = tl.load(tiles + 2 * tile + 1)
    begin = tl.load(bounds + seq)
    length = tl.load(bounds + seq + 1) - begin
    start = tl.load(starts + seq)
    table = tables + seq.to(tl.int64) * table_row

    row = tl.arange(0, ROWS)
    token = first + row // R
    real = (row < TOKENS * R) & (token < length)
    head = kv_head * R + row % R
    columns = tl.arange(0, BLOCK_D)
    mask = real[:, None] & (columns < D)[None, :]
    at = (begin + token).to(tl.int64)
    query_at = q + at[:, None] * q_row + (head * D)[:, None] + columns[None, :]
    query = tl.load(query_at, mask=mask, other=0.0)

    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS, BLOCK_D), tl.float32)
    kv_keys, kv_values = keys + kv_head * D, values + kv_head * D
    # All rows see what comes before the tile's second token; what follows is the business of each.
    seen_by_all = (start + first + 1) // KEYS * KEYS
    end = start + tl.minimum(first + TOKENS, length)
    maximum, total, weighted = attend(
        query,
        start + token,
        kv_keys,
        kv_values,
        table,
        0,
        seen_by_all,
        scale,
        maximum,
        total,
        weighted,
        G,
        D,
        BLOCK_D,
        BLOCK_SIZE,
        KEYS,
        False,
        UPCAST,
    )
    maximum, total, weighted = attend(
        query,
        start + token,
        kv_keys,
        kv_values,
        table,
        seen_by_all,
        end,
        scale,
        maximum,
        total,
        weighted,
        G,
        D,
        BLOCK_D,
        BLOCK_SIZE,
        KEYS,
        True,
        UPCAST,
    )
    result = (weighted / total[:, None]).to(out.dtype.element_ty)
    out_at = out + (at[:, None] * (G * R) + head[:, None]) * D + columns[None, :]
    tl.store(out_at, result, mask=mask)


def prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    sequences: PackedSequences,
    tile: PrefillTile,
) -> None:
    """Write the rows of packed sequences into `out`.

    Args:
        q, out: [num_tokens, H, d]; out is contiguous, rows of q may lie apart.
        keys, values: [num_blocks, block_size, G, d], of q's dtype.
        block_tables: [num_seqs, max_blocks] integers.
        sequences: cut into tiles of `tile.num_tokens`.
    """
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = keys.shape[1:3]
    _prefill_kernel[(sequences.tiles.shape[0], num_kv_heads)](
        q,
        keys,
        values,
        out,
        block_tables,
        sequences.bounds,
        sequences.starts,
        sequences.tiles,
        q.stride(0),
        block_tables.stride(0),
        softmax_scale(head_dim),
        G=num_kv_heads,
        R=num_heads // num_kv_heads,
        D=head_dim,
        BLOCK_D=padded_size(head_dim),
        BLOCK_SIZE=block_size,
        TOKENS=tile.num_tokens,
        ROWS=tile.num_rows,
        KEYS=tile.num_keys,
        UPCAST=INTERPRETED,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
