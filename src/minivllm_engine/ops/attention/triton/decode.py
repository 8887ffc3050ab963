"""Attention of one query a sequence: the keys are split among programs, and their parts combined."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minivllm_engine.ops.attention.tiles import (
    MIN_SPLIT,
    DecodeTile,
    decode_tile,
    padded_size,
    softmax_scale,
)
from minivllm_engine.ops.attention.triton.attend import INTERPRETED, attend
from minivllm_engine.ops.device import launch_options

_MIN_SPLIT = tl.constexpr(MIN_SPLIT)


@triton.jit
def _split_length(context, SPLITS: tl.constexpr, KEYS: tl.constexpr):
    share = tl.cdiv(tl.cdiv(context, SPLITS), KEYS) * KEYS
    return tl.maximum(share, _MIN_SPLIT)


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["tables", "positions"])
def _decode_kernel(
    q,
    keys,
    values,
    out,
    parts,
    part_sizes,
    tables,
    positions,
    q_row,
    table_row,
    scale,
    G: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    if EARLY:
        gdc_wait()
    split, kv_head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    position = tl.load(positions + seq).to(tl.int32)
    share = _split_length(position + 1, SPLITS, KEYS)
    begin = split * share
    end = tl.minimum(begin + share, position + 1)
    if begin >= end:
        return
    row, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    head = kv_head * R + row
    mask = (row < R)[:, None] & (columns < D)[None, :]
    query_at = q + seq * q_row + (head * D)[:, None] + columns[None, :]
    query = tl.load(query_at, mask=mask, other=0.0)
    maximum, total, weighted = attend(
        query,
        tl.full((ROWS,), 0, tl.int32) + position,
        keys + kv_head * D,
        values + kv_head * D,
        tables + seq * table_row,
        begin,
        end,
        scale,
        tl.full((ROWS,), float("-inf"), tl.float32),
        tl.zeros((ROWS,), tl.float32),
        tl.zeros((ROWS, BLOCK_D), tl.float32),
        G,
        D,
        BLOCK_D,
        BLOCK_SIZE,
        KEYS,
        True,
        UPCAST,
    )
    result = weighted / total[:, None]
    at = seq * (G * R) + head
    if SPLITS == 1:
        out_at = out + at[:, None] * D + columns[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=mask)
    else:
        part = at * SPLITS + split
        tl.store(parts + part[:, None] * D + columns[None, :], result, mask=mask)
        tl.store(part_sizes + part, maximum + tl.log2(total), mask=row < R)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _combine_kernel(
    parts,
    part_sizes,
    out,
    positions,
    H: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    if EARLY:
        gdc_wait()
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head, seq = tl.program_id(1), tl.program_id(2).to(tl.int64)
    context = tl.load(positions + seq).to(tl.int32) + 1
    split = tl.arange(0, SPLITS)
    # The others had no keys and have written nothing.
    there = split < tl.cdiv(context, _split_length(context, SPLITS, KEYS))
    part = (seq * H + head) * SPLITS + split
    size = tl.load(part_sizes + part, mask=there, other=float("-inf"))
    weights = tl.exp2(size - tl.max(size, axis=0))
    mask = there[:, None] & (columns < D)[None, :]
    some = tl.load(parts + part[:, None] * D + columns[None, :], mask=mask, other=0.0)
    result = tl.sum(some * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    out_at = out + (seq * H + head) * D + columns
    tl.store(out_at, result.to(out.dtype.element_ty), mask=columns < D)


def decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    positions: torch.Tensor,
    splits: int,
    tile: DecodeTile | None = None,
    early: bool | None = None,
) -> None:
    """Write the rows of `num_seqs` sequences with one token each into the first rows of `out`.

    Args:
        q: [num_seqs, H, d]; rows may lie apart.
        keys, values: [num_blocks, block_size, G, d], of q's dtype.
        out: [at least num_seqs, H, d], contiguous.
        block_tables: [at least num_seqs, max_blocks] integers.
        positions: [num_seqs] integers; all positions up to these are attended to.
        splits: programs that share the keys of a sequence: a power of two.
        tile: another one than `decode_tile` says.
        early: start while the kernel before still runs; by default where the card can.
    """
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = keys.shape[1:3]
    group = num_heads // num_kv_heads
    tile = tile or decode_tile(head_dim, q.dtype)
    parts = part_sizes = out
    if splits > 1:
        shape = (num_seqs, num_heads, splits)
        parts = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
        part_sizes = torch.empty(shape, dtype=torch.float32, device=q.device)
    _decode_kernel[(splits, num_kv_heads, num_seqs)](
        q,
        keys,
        values,
        out,
        parts,
        part_sizes,
        block_tables,
        positions,
        q.stride(0),
        block_tables.stride(0),
        softmax_scale(head_dim),
        G=num_kv_heads,
        R=group,
        D=head_dim,
        BLOCK_D=padded_size(head_dim),
        BLOCK_SIZE=block_size,
        ROWS=padded_size(group),
        KEYS=tile.num_keys,
        SPLITS=splits,
        UPCAST=INTERPRETED,
        num_warps=tile.num_warps,
        num_stages=2,
        **launch_options(early, q.device),
    )
    if splits > 1:
        columns = min(64, padded_size(head_dim))
        _combine_kernel[(triton.cdiv(head_dim, columns), num_heads, num_seqs)](
            parts,
            part_sizes,
            out,
            positions,
            H=num_heads,
            D=head_dim,
            KEYS=tile.num_keys,
            SPLITS=splits,
            COLUMNS=columns,
            num_warps=4,
            **launch_options(early, q.device),
        )
