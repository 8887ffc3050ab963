"""The argmax in Triton: programs take parts of the vocabulary, and their findings are combined."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minivllm_engine.ops.device import launch_options

# Logits that a program has in flight.
_BLOCK = 1024
# Programs that are wanted in all: some for each processor of a large card. With more rows than fill it,
# each program takes several blocks of its row.
_PROGRAMS = 2048
_MAX_BLOCKS = 16
# Parts of a row that are combined at a time.
_PARTS = 256

_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _add(best, best_at, least, broken, number, id, smallest):
    """Compare with what was found so far at the same places; a `smallest` of NaN says that one is broken."""
    better = number > best
    best = tl.where(better, number, best)
    best_at = tl.where(better, id, best_at)
    broken = tl.where(smallest == smallest, broken, 1)
    least = tl.where(smallest < least, smallest, least)
    return best, best_at, least, broken


@triton.jit
def _result(best, best_at, least, broken):
    """The largest number, the smallest id that has it, and the smallest number or NaN."""
    largest = tl.max(best, axis=0)
    id = tl.min(tl.where(best == largest, best_at, _NO_ID), axis=0)
    return largest, id, tl.where(tl.max(broken, axis=0) > 0, float("nan"), tl.min(least, axis=0))


@triton.jit(do_not_specialize=["num_blocks"])
def _part_kernel(
    logits,
    largest,
    smallest,
    ids,
    row_stride,
    num_blocks,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    if EARLY:
        gdc_wait()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = part * num_blocks * BLOCK
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_at = tl.full((BLOCK,), _NO_ID, tl.int32)
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for block in range(num_blocks):
        at = first + block * BLOCK + tl.arange(0, BLOCK)
        mask = at < VOCAB
        number = tl.load(logits + row * row_stride + at, mask=mask, other=0.0).to(tl.float32)
        # Not so for NaN, which no comparison is.
        lowest = tl.where(tl.abs(number) <= _LARGEST, number, float("nan"))
        number = tl.where(number == number, number, 0.0)
        number = tl.minimum(tl.maximum(number, -_LARGEST), _LARGEST)
        number = tl.where(mask, number, float("-inf"))
        lowest = tl.where(mask, lowest, float("inf"))
        best, best_at, least, broken = _add(best, best_at, least, broken, number, at, lowest)
    winner, winner_at, lowest = _result(best, best_at, least, broken)
    to = row * tl.num_programs(0) + part
    tl.store(largest + to, winner)
    tl.store(smallest + to, lowest)
    tl.store(ids + to, winner_at)


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=["token_ids", "alive"])
def _combine_kernel(
    largest,
    smallest,
    ids,
    token_ids,
    alive,
    num_parts,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    if EARLY:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    best = tl.full((PARTS,), float("-inf"), tl.float32)
    best_at = tl.full((PARTS,), _NO_ID, tl.int32)
    least = tl.full((PARTS,), float("inf"), tl.float32)
    broken = tl.zeros((PARTS,), tl.int32)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)
        mask = part < num_parts
        at = row * num_parts + part
        number = tl.load(largest + at, mask=mask, other=float("-inf"))
        lowest = tl.load(smallest + at, mask=mask, other=float("inf"))
        id = tl.load(ids + at, mask=mask, other=_NO_ID)
        best, best_at, least, broken = _add(best, best_at, least, broken, number, id, lowest)
    winner, winner_at, lowest = _result(best, best_at, least, broken)
    finite, differ = lowest == lowest, lowest != winner
    tl.store(token_ids + row, winner_at.to(tl.int64))
    tl.store(alive + row, finite & (differ | (VOCAB == 1)))


def greedy(
    logits: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    early: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the argmax of each row, and whether the row can be trusted. Waits for nothing.

    Of equal logits the one with the smallest id wins. NaN counts as 0, infinities as the largest fp32.

    Args:
        logits: [N, vocab], fp32, fp16 or bf16; rows may lie apart, each is contiguous.
        out: token_ids [N] int64 and alive [N] bool, contiguous, to be written to instead of new ones.
        early: start while the kernel before still runs; by default where the card can.

    Returns:
        token_ids [N] int64, valid ids also where a row is non-finite, and alive [N] bool: are the logits
        finite, and, if there are several, not all equal?
    """
    num_rows, vocab = logits.shape
    if out is None:
        out = (
            torch.empty(num_rows, dtype=torch.int64, device=logits.device),
            torch.empty(num_rows, dtype=torch.bool, device=logits.device),
        )
    if not num_rows:
        return out
    num_blocks = blocks_of_program(num_rows, vocab)
    num_parts = triton.cdiv(vocab, num_blocks * _BLOCK)
    extremes = torch.empty(2, num_rows, num_parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    largest, smallest = extremes.unbind(0)
    _part_kernel[(num_parts, num_rows)](
        logits,
        largest,
        smallest,
        ids,
        logits.stride(0),
        num_blocks,
        VOCAB=vocab,
        BLOCK=_BLOCK,
        num_warps=4,
        **launch_options(early, logits.device),
    )
    _combine_kernel[(num_rows,)](
        largest,
        smallest,
        ids,
        *out,
        num_parts,
        VOCAB=vocab,
        PARTS=_PARTS,
        num_warps=4,
        **launch_options(early, logits.device),
    )
    return out


def blocks_of_program(num_rows: int, vocab: int) -> int:
    """Blocks of its row that each program takes: 1 as long as the rows do not fill a large card."""
    return min(max(num_rows * vocab // (_BLOCK * _PROGRAMS), 1), _MAX_BLOCKS)
