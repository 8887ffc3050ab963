"""The causal convolution with SiLU in Triton: histories are read from the pool and moved on in place.

Shapes and roundings as in reference.py: D channels, W wide, the pool is [num_slots, D, W - 1], sums are
taken in fp32, rounded once, and then go through SiLU.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minivllm_engine.ops.device import launch_options
from minivllm_engine.ops.varlen import PackedSequences

_STEP_CHANNELS = 512
TILE_TOKENS, _TILE_CHANNELS = 16, 128


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
        sequences: cut into tiles of 16 tokens.
    """

    slots: torch.Tensor
    sequences: PackedSequences

    @classmethod
    def build(
        cls, slots: torch.Tensor, starts: tuple[int, ...], lengths: tuple[int, ...]
    ) -> "TritonConvPlan":
        """Plan the next tokens of some sequences.

        Args:
            slots: [num_seqs], no two alike.
            starts: tokens of each sequence that came before. 0 means that its history is zero.
            lengths: tokens of each, in the order of the rows.
        """
        return cls(slots, PackedSequences.build(starts, lengths, TILE_TOKENS, slots.device))


@triton.jit(do_not_specialize_on_alignment=["slots", "bounds", "starts", "tiles"])
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
    D: tl.constexpr,
    W: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    tile = tl.program_id(1)
    seq = tl.load(tiles + 2 * tile)
    if seq < 0:
        return
    first = tl.load(tiles + 2 * tile + 1)
    begin = tl.load(bounds + seq).to(tl.int64)
    length = (tl.load(bounds + seq + 1) - begin).to(tl.int32)
    has_past = tl.load(starts + seq) > 0
    channel = (tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    mask = channel < D
    history_at = pool + tl.load(slots + seq).to(tl.int64) * pool_row + channel * (W - 1)
    sequence_at = x + begin * x_row + channel

    tokens = (first + tl.arange(0, TOKENS))[:, None]
    inside = mask & (tokens < length)
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(W):
        source = tokens - (W - 1) + tap
        values = tl.load(
            sequence_at + source.to(tl.int64) * x_row, mask=inside & (source >= 0), other=0.0
        ).to(tl.float32)
        # At most the first tile of a sequence sees the history.
        past = tl.load(
            history_at + (W - 1) + source, mask=inside & (source < 0) & has_past, other=0.0
        ).to(tl.float32)
        weight = tl.load(conv_weight + tap * D + channel, mask=mask, other=0.0).to(tl.float32)
        total += (values + past) * weight
    out_at = out + (begin + tokens) * D + channel
    tl.store(out_at, _rounded_silu(total, out.dtype.element_ty), mask=inside)

    # The program that reads a history is the one that moves it on: no other could know when.
    if first == 0:
        columns = tl.arange(0, COLUMNS)[:, None]
        wanted = mask & (columns < W - 1)
        last = length - (W - 1) + columns
        newest = tl.load(
            sequence_at + last.to(tl.int64) * x_row, mask=wanted & (last >= 0), other=0.0
        )
        kept = tl.load(history_at + (W - 1) + last, mask=wanted & (last < 0) & has_past, other=0.0)
        tl.debug_barrier()
        tl.store(history_at + columns, tl.where(last >= 0, newest, kept), mask=wanted)


def causal_conv_prefill(
    x: torch.Tensor, pool: torch.Tensor, conv_weight: torch.Tensor, plan: TritonConvPlan
) -> torch.Tensor:
    """Convolve packed sequences; their history in `pool` moves on to their ends.

    Args:
        x: [num_tokens, D], raw inputs; rows may lie apart, each is contiguous.
        pool: [num_slots, D, W - 1], of x's dtype.
        conv_weight: [W, D], any float dtype.
        plan: made for these sequences.

    Returns:
        [num_tokens, D] after SiLU.
    """
    conv_width, channels = conv_weight.shape
    out = x.new_empty(x.shape[0], channels)
    sequences = plan.sequences
    _prefill_kernel[(triton.cdiv(channels, _TILE_CHANNELS), sequences.tiles.shape[0])](
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
        D=channels,
        W=conv_width,
        COLUMNS=triton.next_power_of_2(conv_width - 1),
        TOKENS=TILE_TOKENS,
        CHANNELS=_TILE_CHANNELS,
        num_warps=4,
    )
    return out
