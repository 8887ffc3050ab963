"""A running softmax over some keys of one sequence: what the attention kernels have in common."""

import triton
import triton.language as tl

# The interpreter computes with bf16 as if its bits were integers, so whatever is fed to a matrix product
# there must be fp32: the kernels' UPCAST.
INTERPRETED: bool = triton.knobs.runtime.interpret


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
def attend(
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
