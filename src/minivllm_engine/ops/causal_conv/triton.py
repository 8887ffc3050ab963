"""The causal convolution with SiLU in Triton: histories are read from the pool and moved on in place.

Shapes and roundings as in reference.py: D channels, W wide, the pool is [num_slots, D, W - 1], sums are
taken in fp32, rounded once, and then go through SiLU. What comes of prompts can be cut into queries, keys
and values, each packed, and the first two normed, as the chunked delta rule wants them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minivllm_engine.ops.device import launch_options
from minivllm_engine.ops.varlen import PackedSequences

_STEP_CHANNELS = 512
_NORM_EPS = tl.constexpr(1e-6)
TILE_TOKENS, _TILE_CHANNELS = 32, 128


@triton.jit
def _rounded_silu(x, dtype: tl.constexpr):
    x = x.to(dtype).to(tl.float32)
    return (x * tl.sigmoid(x)).to(dtype)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _step_kernel(
    x,
    pool,
    conv_weight,
    out,
    slots,
    positions,
    x_row,
    pool_row,
    D: tl.constexpr,
    W: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    seq = tl.program_id(1).to(tl.int64)
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channels < D
    columns = tl.arange(0, COLUMNS)
    channel, column = channels[:, None], columns[None, :]
    in_history = mask[:, None] & (column < W - 1)
    weights = tl.load(conv_weight + column * D + channel, mask=in_history, other=0.0).to(tl.float32)
    own_weight = tl.load(conv_weight + (W - 1) * D + channels, mask=mask, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()

    out_at = out + seq * D + channels
    dtype = out.dtype.element_ty
    slot = tl.load(slots + seq).to(tl.int64)
    if slot < 0:
        tl.store(out_at, tl.zeros((CHANNELS,), dtype), mask=mask)
        return
    has_past = tl.load(positions + seq) > 0
    history_at = pool + slot * pool_row + channel * (W - 1) + column
    newest_at = x + seq * x_row

    history = tl.load(history_at, mask=in_history & has_past, other=0.0)
    # The history one column on, with the token itself in the last one.
    moved = tl.load(history_at + 1, mask=in_history & has_past & (column < W - 2), other=0.0)
    token = tl.load(newest_at + channel, mask=mask[:, None] & (column == W - 2), other=0.0)
    own = tl.load(newest_at + channels, mask=mask, other=0.0).to(tl.float32)

    total = own * own_weight + tl.sum(history.to(tl.float32) * weights, axis=1)
    tl.store(out_at, _rounded_silu(total, dtype), mask=mask)
    # Another thread may still have to read what this one is about to overwrite.
    tl.debug_barrier()
    tl.store(history_at, tl.where(column == W - 2, token, moved), mask=in_history)


def causal_conv_step(
    x: torch.Tensor,
    pool: torch.Tensor,
    conv_weight: torch.Tensor,
    *,
    slots: torch.Tensor,
    positions: torch.Tensor,
    early: bool | None = None,
) -> torch.Tensor:
    """Take one token for each of N sequences; their history in `pool` moves on by one.

    Args:
        x: [N, D], raw inputs; rows may lie apart, each is contiguous.
        pool: [num_slots, D, W - 1], of x's dtype.
        conv_weight: [W, D], any float dtype.
        slots: [N] integers. Negative ones are padding: they touch no history, and their output is zero.
            No others may be alike, except that of a sink, whose content is then undefined.
        positions: [N] integers. At 0 a sequence begins: its history is zero, whatever the slot holds.
        early: start while the kernel before still runs; by default where the card can.

    Returns:
        [N, D] after SiLU.
    """
    conv_width, channels = conv_weight.shape
    out = x.new_empty(x.shape[0], channels)
    _step_kernel[(triton.cdiv(channels, _STEP_CHANNELS), x.shape[0])](
        x,
        pool,
        conv_weight,
        out,
        slots,
        positions,
        x.stride(0),
        pool.stride(0),
        D=channels,
        W=conv_width,
        COLUMNS=triton.next_power_of_2(conv_width - 1),
        CHANNELS=_STEP_CHANNELS,
        num_warps=4,
        **launch_options(early, x.device),
    )
    return out


@dataclass(frozen=True, slots=True)
class TritonConvPlan:
    """Some packed sequences, and where their histories lie: the same for all layers.

    Attributes:
        slots: [num_seqs] integers, no two alike.
        sequences: cut into tiles of TILE_TOKENS.
        normed: queries and keys are to have norm 1.
    """

    slots: torch.Tensor
    sequences: PackedSequences
    normed: bool = False

    @classmethod
    def build(
        cls,
        slots: torch.Tensor,
        starts: tuple[int, ...],
        lengths: tuple[int, ...],
        *,
        normed: bool = False,
    ) -> "TritonConvPlan":
        """Plan the next tokens of some sequences.

        Args:
            slots: [num_seqs], no two alike.
            starts: tokens of each sequence that came before. 0 means that its history is zero.
            lengths: tokens of each, in the order of the rows.
            normed: queries and keys are to have norm 1.
        """
        return cls(slots, PackedSequences.build(starts, lengths, TILE_TOKENS, slots.device), normed)


@triton.jit
def _norm_heads(x, HEAD: tl.constexpr):
    """x [rows, channels] fp32 with norm 1 over each HEAD channels."""
    heads = tl.reshape(x, (x.shape[0], x.shape[1] // HEAD, HEAD))
    inverse = 1.0 / tl.sqrt(tl.sum(heads * heads, axis=2) + _NORM_EPS)
    return tl.reshape(heads * inverse[:, :, None], x.shape)


@triton.jit
def _part(first_channel, KEYS: tl.constexpr):
    """Where the channels of queries, keys or values begin: no tile has channels of two of them."""
    return tl.minimum(first_channel // KEYS, 2) * KEYS if KEYS else 0


@triton.jit
def _store(
    part_at,
    total,
    first_row,
    row,
    channel,
    first_channel,
    inside,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD: tl.constexpr,
):
    """Round, activate and norm the sums of some rows, and write them to queries, keys or values."""
    dtype = part_at.dtype.element_ty
    result = _rounded_silu(total, dtype)
    column = channel - _part(first_channel, KEYS)
    if first_channel < 2 * KEYS:
        if HEAD:
            result = _norm_heads(result.to(tl.float32), HEAD).to(dtype)
        tl.store(part_at + first_row * KEYS + row * KEYS + column, result, mask=inside)
    else:
        WIDTH: tl.constexpr = D - 2 * KEYS
        tl.store(part_at + first_row * WIDTH + row * WIDTH + column, result, mask=inside)


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["slots", "bounds", "starts", "tiles"],
)
def _prefill_kernel(
    x,
    pool,
    conv_weight,
    out,
    slots,
    bounds,
    starts,
    tiles,
    x_row,
    pool_row,
    num_tokens,
    D: tl.constexpr,
    W: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD: tl.constexpr,
):
    tile = tl.program_id(1)
    seq = tl.load(tiles + 2 * tile)
    if seq < 0:
        return
    first = tl.load(tiles + 2 * tile + 1)
    begin = tl.load(bounds + seq).to(tl.int64)
    length = (tl.load(bounds + seq + 1) - begin).to(tl.int32)
    has_past = tl.load(starts + seq) > 0
    first_channel = tl.program_id(0) * CHANNELS
    channel = (first_channel + tl.arange(0, CHANNELS))[None, :]
    mask = channel < D
    history_at = pool + tl.load(slots + seq).to(tl.int64) * pool_row + channel * (W - 1)
    sequence_at = x + begin * x_row + channel

    part_at = out + num_tokens.to(tl.int64) * _part(first_channel, KEYS)
    row = tl.arange(0, TOKENS)[:, None]
    tile_at = x + (begin + first) * x_row + channel
    # The first tokens of a sequence, which see the history, are taken by themselves.
    inside = mask & (first + row < length) & (first + row >= W - 1)
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(W):
        weight = tl.load(conv_weight + tap * D + channel, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(tile_at + (row + tap - (W - 1)) * x_row, mask=inside, other=0.0)
        total += values.to(tl.float32) * weight
    _store(part_at, total, begin + first, row, channel, first_channel, inside, D, KEYS, HEAD)

    if first > 0:
        return
    row = tl.arange(0, COLUMNS)[:, None]
    inside = mask & (row < length) & (row < W - 1)
    total = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    for tap in tl.static_range(W):
        weight = tl.load(conv_weight + tap * D + channel, mask=mask, other=0.0).to(tl.float32)
        source = row + tap - (W - 1)
        values = tl.load(sequence_at + source * x_row, mask=inside & (source >= 0), other=0.0)
        seen = inside & (source < 0) & has_past
        past = tl.load(history_at + (W - 1) + source, mask=seen, other=0.0)
        total += (values.to(tl.float32) + past.to(tl.float32)) * weight
    _store(part_at, total, begin, row, channel, first_channel, inside, D, KEYS, HEAD)

    # The program that reads a history is the one that moves it on: no other could know when.
    wanted = mask & (row < W - 1)
    last = length - (W - 1) + row
    newest = tl.load(sequence_at + last.to(tl.int64) * x_row, mask=wanted & (last >= 0), other=0.0)
    kept = tl.load(history_at + (W - 1) + last, mask=wanted & (last < 0) & has_past, other=0.0)
    tl.debug_barrier()
    tl.store(history_at + row, tl.where(last >= 0, newest, kept), mask=wanted)


def causal_conv_prefill(
    x: torch.Tensor,
    pool: torch.Tensor,
    conv_weight: torch.Tensor,
    plan: TritonConvPlan,
    *,
    key_dim: int = 0,
    num_heads: int = 1,
) -> torch.Tensor:
    """Convolve packed sequences; their history in `pool` moves on to their ends.

    Args:
        x: [num_tokens, D], raw inputs; rows may lie apart, each is contiguous.
        pool: [num_slots, D, W - 1], of x's dtype.
        conv_weight: [W, D], any float dtype.
        plan: made for these sequences.
        key_dim: the first channels are queries and the next keys, so many of each, in `num_heads` heads,
            whose size is a power of two where they are to be normed. Without it all are values.

    Returns:
        [num_tokens * D] after SiLU: queries [num_tokens, key_dim], then keys, then values. Rows of no
        sequence are undefined.
    """
    conv_width, channels = conv_weight.shape
    out = x.new_empty(x.shape[0] * channels)
    sequences = plan.sequences
    head = key_dim // num_heads if plan.normed else 0
    tile = max(min(_TILE_CHANNELS, key_dim & -key_dim), head) if key_dim else _TILE_CHANNELS
    _prefill_kernel[(triton.cdiv(channels, tile), sequences.tiles.shape[0])](
        x,
        pool,
        conv_weight,
        out,
        plan.slots,
        sequences.bounds,
        sequences.starts,
        sequences.tiles,
        x.stride(0),
        pool.stride(0),
        x.shape[0],
        D=channels,
        W=conv_width,
        COLUMNS=triton.next_power_of_2(conv_width - 1),
        TOKENS=TILE_TOKENS,
        CHANNELS=tile,
        KEYS=key_dim,
        HEAD=head,
        num_warps=4,
    )
    return out
