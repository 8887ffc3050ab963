"""The largest logits of a row in their order, without a sort: two passes over the row, one over a part."""

import torch
import triton
import triton.language as tl

from minivllm_engine.ops.sampling.race import LARGEST

_BLOCK = 2048
# Logits that are looked at closely. More of them than that, which takes many equal ones, are looked
# through again for each one that is wanted: slow, and right.
_LISTED = tl.constexpr(1024)
_NO_ID = tl.constexpr(2**31 - 1)
_LARGEST = tl.constexpr(LARGEST)


@triton.jit
def number_of(logits, at, mask):
    """Logits as they are compared: NaN counts as 0, infinity as LARGEST, -0 as 0."""
    x = tl.load(logits + at, mask=mask, other=0.0).to(tl.float32)
    x = tl.where(x == x, x, 0.0) + 0.0
    return tl.where(mask, tl.minimum(x, _LARGEST), float("-inf"))


@triton.jit
def key_of(x):
    """Integers in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _bound(logits, count, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """A key that at least `count` logits of the row reach, and not many more: `count` lanes' best do."""
    lanes = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, VOCAB, BLOCK):
        at = first + tl.arange(0, BLOCK)
        lanes = tl.maximum(lanes, number_of(logits, at, at < VOCAB))
    keys = key_of(lanes)
    low = tl.full((), -2139095041, tl.int64)  # of -inf, which all reach
    high = tl.full((), 2139095041, tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        enough = tl.sum((keys >= middle).to(tl.int32), axis=0) >= count
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _one_by_one(logits, count, values, ids, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Look through the whole row for each of them."""
    last = tl.full((), float("inf"), tl.float32)
    last_id = tl.full((), 0, tl.int32)
    for i in range(count):
        best_x = tl.full((BLOCK,), float("-inf"), tl.float32)
        best_ids = tl.full((BLOCK,), _NO_ID, tl.int32)
        for first in range(0, VOCAB, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = number_of(logits, at, at < VOCAB)
            after = (x < last) | ((x == last) & (at > last_id))
            better = (x > best_x) | ((x == best_x) & (best_ids == _NO_ID))
            better &= after & (at < VOCAB)
            best_x = tl.where(better, x, best_x)
            best_ids = tl.where(better, at, best_ids)
        last = tl.max(best_x, axis=0)
        last_id = tl.min(tl.where(best_x == last, best_ids, _NO_ID), axis=0)
        tl.store(values + i, last)
        tl.store(ids + i, last_id)


@triton.jit(do_not_specialize=["rows_stride", "width", "most"])
def _largest_kernel(
    logits,
    rows,
    counts,
    values,
    ids,
    listed,
    listed_ids,
    num_listed,
    row_stride,
    rows_stride,
    width,
    most,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + program * rows_stride)
    if (count > 0) & (count <= most):
        logits += tl.load(rows + program * rows_stride).to(tl.int64) * row_stride
        listed += program * _LISTED
        listed_ids += program * _LISTED
        num_listed += program
        bound = _bound(logits, count, VOCAB, BLOCK)
        for first in range(0, VOCAB, BLOCK):
            at = first + tl.arange(0, BLOCK)
            mask = at < VOCAB
            x = number_of(logits, at, mask)
            found = mask & (key_of(x) >= bound)
            place = tl.atomic_add(num_listed + tl.zeros_like(at), 1, mask=found)
            found &= place < _LISTED
            tl.store(listed + place, x, mask=found)
            tl.store(listed_ids + place, at, mask=found)
        tl.debug_barrier()
        total = tl.atomic_add(num_listed, 0)
        values += program * width
        ids += program * width
        if total <= _LISTED:
            lane = tl.arange(0, _LISTED)
            left = lane < total
            x = tl.load(listed + lane, mask=left, other=0.0, cache_modifier=".cg")
            id = tl.load(listed_ids + lane, mask=left, other=0, cache_modifier=".cg")
            for i in range(count):
                best = tl.max(tl.where(left, x, float("-inf")), axis=0)
                best_id = tl.min(tl.where(left & (x == best), id, _NO_ID), axis=0)
                left &= id != best_id
                tl.store(values + i, best)
                tl.store(ids + i, best_id)
        else:
            _one_by_one(logits, count, values, ids, VOCAB, BLOCK)


def largest(
    logits: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the largest logits of some rows, from the largest down; of equal ones the smallest id is first.

    Args:
        logits: [num_rows, vocab], fp32, fp16 or bf16; rows may lie apart, each is contiguous.
        rows, counts: [num] int32 with one stride: which row, and how many of its logits. Nothing is done
            where the count is not in 1 to `most`, which is at most the vocabulary.

    Returns:
        values fp32 and ids int32, both [num, most], of which the first of each row are written.
    """
    num, device = len(rows), logits.device
    values = torch.empty(num, most, dtype=torch.float32, device=device)
    ids = torch.empty(num, most, dtype=torch.int32, device=device)
    listed = torch.empty(num, _LISTED.value, dtype=torch.float32, device=device)
    listed_ids = torch.empty(num, _LISTED.value, dtype=torch.int32, device=device)
    num_listed = torch.zeros(num, dtype=torch.int32, device=device)
    assert rows.stride(0) == counts.stride(0)
    if num:
        _largest_kernel[(num,)](
            logits,
            rows,
            counts,
            values,
            ids,
            listed,
            listed_ids,
            num_listed,
            logits.stride(0),
            rows.stride(0),
            most,
            most,
            VOCAB=logits.shape[-1],
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return values, ids
