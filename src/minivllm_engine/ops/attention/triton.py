"""Grouped-query attention over a paged KV cache in Triton: see reference.py for letters and layouts.

A program works for one key/value head on a tile of rows, a row being a query head of a token, so that all R
heads of a group share what is read. Decodes split their keys among programs, whose parts are then combined.
Only positions of the sequence are read: blocks hold whatever others have left in them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from minivllm_engine.model_input import ModelInput
from minivllm_engine.ops.attention.tiles import KVShape, PrefillTile, num_splits, prefill_tile
from minivllm_engine.ops.triton_target import INTERPRETED, device_limits
from minivllm_engine.ops.varlen import PackedSequences

_LOG2_E = 1.4426950408889634
# A split of a decode's keys is at least so long.
_MIN_SPLIT = tl.constexpr(128)
# tl.dot wants at least so many rows.
_DOT_ROWS = 16


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which keys each token of a step sees; the same for all attention layers.

    Attributes:
        num_decodes: sequences with one token, the first rows of the batch.
        num_splits: programs that share the keys of a decode.
        positions: [num_decodes] integers, of their tokens.
        block_tables: [num_seqs, max_blocks] integers.
        prefill: the other sequences, cut into tiles of `tile.num_tokens`, or None.
        tile: see `prefill_tile`.
    """

    num_decodes: int
    num_splits: int
    positions: torch.Tensor
    block_tables: torch.Tensor
    prefill: PackedSequences | None
    tile: PrefillTile

    @classmethod
    def build(cls, batch: ModelInput, shape: KVShape, dtype: torch.dtype) -> "AttentionPlan":
        """dtype: of the queries and the cache."""
        cut, device = batch.num_decodes, batch.slots.device
        limits = device_limits(device)
        tile = prefill_tile(shape, dtype, limits)
        splits = 1
        if cut:
            longest = max(batch.starts[:cut]) + 1
            splits = num_splits(cut, shape.num_kv_heads, longest, limits)
        prefill = None
        if cut < len(batch.lengths):
            prefill = PackedSequences.build(
                batch.starts[cut:], batch.lengths[cut:], tile.num_tokens, device, first_row=cut
            )
        return cls(cut, splits, batch.positions[:cut], batch.block_tables, prefill, tile)


@triton.jit
def _dot(x, y, accumulator, UPCAST: tl.constexpr):
    if UPCAST:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, accumulator, input_precision="ieee")


@triton.jit
def _cache_rows(table, keys_at, end, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """Rows of the cache with the KEYS positions from `keys_at`, a multiple of KEYS, that are below `end`."""
    offsets = tl.arange(0, KEYS)
    if BLOCK_SIZE % KEYS == 0:
        block = tl.load(table + keys_at // BLOCK_SIZE).to(tl.int64)
        rows = block * BLOCK_SIZE + keys_at % BLOCK_SIZE + offsets
    else:
        positions = keys_at + offsets
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=positions < end, other=0)
        rows = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    return rows


@triton.jit
def _attend(
    query,
    query_positions,
    keys,
    values,
    table,
    begin,
    end,
    scale,
    maximum,
    total,
    weighted,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Add positions from `begin`, a multiple of KEYS, to `end` to a running softmax in powers of two.

    query [rows, BLOCK_D]; keys and values point at the head; MASKED: not every row sees every one of
    them, or `end` is not a multiple of KEYS.
    """
    columns = tl.arange(0, BLOCK_D)
    for at in range(begin, end, KEYS):
        rows = _cache_rows(table, at, end, BLOCK_SIZE, KEYS)
        offsets = rows[:, None] * (G * D) + columns[None, :]
        positions = at + tl.arange(0, KEYS)
        if MASKED:
            mask = (positions < end)[:, None] & (columns < D)[None, :]
            key = tl.load(keys + offsets, mask=mask, other=0.0)
            value = tl.load(values + offsets, mask=mask, other=0.0)
        elif BLOCK_D != D:
            mask = (columns < D)[None, :]
            key = tl.load(keys + offsets, mask=mask, other=0.0)
            value = tl.load(values + offsets, mask=mask, other=0.0)
        else:
            key = tl.load(keys + offsets)
            value = tl.load(values + offsets)
        nothing = tl.zeros((query.shape[0], KEYS), tl.float32)
        scores = _dot(query, tl.trans(key), nothing, UPCAST) * scale
        if MASKED:
            seen = (positions[None, :] <= query_positions[:, None]) & (positions < end)[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        rescale = tl.exp2(maximum - higher)
        total = total * rescale + tl.sum(weights, axis=1)
        weighted = _dot(weights.to(value.dtype), value, weighted * rescale[:, None], UPCAST)
        maximum = higher
    return maximum, total, weighted


@triton.jit(do_not_specialize_on_alignment=["tables", "bounds", "starts", "tiles"])
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
    maximum, total, weighted = _attend(
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
    maximum, total, weighted = _attend(
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


@triton.jit
def _split_length(context, SPLITS: tl.constexpr, KEYS: tl.constexpr):
    share = tl.cdiv(tl.cdiv(context, SPLITS), KEYS) * KEYS
    return tl.maximum(share, _MIN_SPLIT)


@triton.jit(do_not_specialize_on_alignment=["tables", "positions"])
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
):
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
    maximum, total, weighted = _attend(
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
):
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


def paged_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan
) -> torch.Tensor:
    """Causal attention of all tokens of a step; their own keys and values are in the cache already.

    Args:
        q: [num_tokens, H, d]; rows may lie apart, each is contiguous.
        keys, values: [num_blocks, block_size, G, d], of q's dtype; block_size a multiple of 16.
        plan: made for this step.

    Returns:
        [num_tokens, H, d] in q's dtype.
    """
    out = q.new_empty(q.shape)
    if plan.num_decodes:
        _decode(q, keys, values, out, plan)
    if plan.prefill is not None:
        _prefill(q, keys, values, out, plan, plan.prefill)
    return out


def _decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    plan: AttentionPlan,
) -> None:
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = keys.shape[1:3]
    group, splits = num_heads // num_kv_heads, plan.num_splits
    num_keys = 32 if head_dim > 128 or q.dtype == torch.float32 else 64
    parts = part_sizes = out
    if splits > 1:
        shape = (plan.num_decodes, num_heads, splits)
        parts = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
        part_sizes = torch.empty(shape, dtype=torch.float32, device=q.device)
    _decode_kernel[(splits, num_kv_heads, plan.num_decodes)](
        q,
        keys,
        values,
        out,
        parts,
        part_sizes,
        plan.block_tables,
        plan.positions,
        q.stride(0),
        plan.block_tables.stride(0),
        head_dim**-0.5 * _LOG2_E,
        G=num_kv_heads,
        R=group,
        D=head_dim,
        BLOCK_D=_padded(head_dim),
        BLOCK_SIZE=block_size,
        ROWS=_padded(group),
        KEYS=num_keys,
        SPLITS=splits,
        UPCAST=INTERPRETED,
        num_warps=4,
        num_stages=2,
    )
    if splits > 1:
        columns = min(64, _padded(head_dim))
        _combine_kernel[(triton.cdiv(head_dim, columns), num_heads, plan.num_decodes)](
            parts,
            part_sizes,
            out,
            plan.positions,
            H=num_heads,
            D=head_dim,
            KEYS=num_keys,
            SPLITS=splits,
            COLUMNS=columns,
            num_warps=4,
        )


def _prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    plan: AttentionPlan,
    sequences: PackedSequences,
) -> None:
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = keys.shape[1:3]
    tile = plan.tile
    tables = plan.block_tables[plan.num_decodes :]
    _prefill_kernel[(sequences.tiles.shape[0], num_kv_heads)](
        q,
        keys,
        values,
        out,
        tables,
        sequences.bounds,
        sequences.starts,
        sequences.tiles,
        q.stride(0),
        tables.stride(0),
        head_dim**-0.5 * _LOG2_E,
        G=num_kv_heads,
        R=num_heads // num_kv_heads,
        D=head_dim,
        BLOCK_D=_padded(head_dim),
        BLOCK_SIZE=block_size,
        TOKENS=tile.num_tokens,
        ROWS=tile.num_rows,
        KEYS=tile.num_keys,
        UPCAST=INTERPRETED,
        num_warps=tile.num_warps,
        num_stages=2,
    )


def _padded(size: int) -> int:
    return max(_DOT_ROWS, triton.next_power_of_2(size))
