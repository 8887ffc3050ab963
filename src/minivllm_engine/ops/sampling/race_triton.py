"""The race in Triton: one program a row, which reads it once, and again for each part that it must know.

What top-k and top-p leave begins with the likeliest token, in the order of the logits. So the first of all
tokens is drawn, and if it is not among those that are left, the first of the ones that are likelier, and so
on: with the same times this ends at the first of those that are left. Nothing is sorted, and few rounds do.
"""

import torch
import triton
import triton.language as tl

from minivllm_engine.ops.sampling import race as plain
from minivllm_engine.ops.sampling.largest_triton import key_of, largest, number_of
from minivllm_engine.ops.sampling.race import RaceRows

_BLOCK = 2048
_NO_ID = tl.constexpr(2**31 - 1)
_LARGEST = tl.constexpr(plain.LARGEST)
_DIFFERENCE = tl.constexpr(plain.DIFFERENCE)
_FARTHEST = tl.constexpr(plain.FARTHEST)
_UNIT = tl.constexpr(plain.UNIT)
_FEW = tl.constexpr(plain.FEW)
_COLUMNS = tl.constexpr(plain.COLUMNS)
_ROW, _KEY0, _KEY1 = tl.constexpr(plain.ROW), tl.constexpr(plain.KEY0), tl.constexpr(plain.KEY1)
_SCALE, _REACH = tl.constexpr(plain.SCALE), tl.constexpr(plain.REACH)
_TOP_P, _TOP_K = tl.constexpr(plain.TOP_P), tl.constexpr(plain.TOP_K)
_LOG2_E = tl.constexpr(plain.LOG2_E)
_GOLDEN, _MUL1 = tl.constexpr(plain.GOLDEN), tl.constexpr(plain.MUL1)
_MUL2 = tl.constexpr(plain.MUL2)
_E0, _E1, _E2, _E3, _E4, _E5 = (tl.constexpr(c) for c in plain.EXP2)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = (tl.constexpr(c) for c in plain.LOG2)


@triton.jit
def _exp2(x):
    whole = tl.floor(x)
    part = x - whole
    series = _E5 * part + _E4
    series = series * part + _E3
    series = series * part + _E2
    series = series * part + _E1
    series = series * part + _E0
    series = series * part + 1.0
    return series * ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _wait(id, key0, key1):
    x = id.to(tl.uint32) * _GOLDEN + key0
    x = (x ^ (x >> 16)) * _MUL1 + key1
    x = (x ^ (x >> 15)) * _MUL2
    x = x ^ (x >> 16)
    lower = x < 0x80000000
    near = tl.where(lower, x, x ^ 0xFFFFFFFF).to(tl.int32).to(tl.float32) + 0.5
    bits = near.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    t = tl.where(lower, near * 4.656612873077393e-10, 2.0 - mantissa)
    halvings = tl.where(lower, 0, 31 - ((bits >> 23) - 127)).to(tl.float32)
    series = _L8 * t + _L7
    series = series * t + _L6
    series = series * t + _L5
    series = series * t + _L4
    series = series * t + _L3
    series = series * t + _L2
    series = series * t + _L1
    series = series * t + _L0
    return series * t + halvings


@triton.jit
def _before(
    logits, cut, cut_id, best, scale, reach, key0, key1, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """Of the tokens before the one that is given, in order: their weight, and which of them comes first."""
    weight = tl.zeros((BLOCK,), tl.int64)
    first_time = tl.full((BLOCK,), float("inf"), tl.float32)
    first_id = tl.full((BLOCK,), _NO_ID, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < VOCAB
        x = number_of(logits, at, mask)
        distance = tl.minimum(best - tl.maximum(x, -_LARGEST), _DIFFERENCE) * scale
        near = mask & (distance <= _FARTHEST) & (x >= -_LARGEST)
        near &= (x > cut) | ((x == cut) & (at < cut_id))
        distance = tl.minimum(tl.maximum(tl.where(near, distance, 0.0), 0.0), _FARTHEST)
        weight += tl.where(near, _exp2(-distance) * _UNIT, 0.0).to(tl.int64)
        time = _wait(at, key0, key1) * _exp2(distance)
        time = tl.where(near & (distance <= reach), time, float("inf"))
        sooner = time < first_time
        first_time = tl.where(sooner, time, first_time)
        first_id = tl.where(sooner, at, first_id)
    time = tl.min(first_time, axis=0)
    id = tl.min(tl.where(first_time == time, first_id, _NO_ID), axis=0)
    return tl.sum(weight, axis=0), id


@triton.jit
def _reaching(logits, key, id, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many logits have a larger key, and how many that key with an id of at most `id`."""
    larger = tl.zeros((BLOCK,), tl.int32)
    equal = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, VOCAB, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < VOCAB
        own = key_of(number_of(logits, at, mask))
        larger += (mask & (own > key)).to(tl.int32)
        equal += (mask & (own == key) & (at <= id)).to(tl.int32)
    return tl.sum(larger, axis=0), tl.sum(equal, axis=0)


@triton.jit
def _kth(logits, top_k, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The logit that is number `top_k` from the largest down, and its id, by halving: some 50 passes."""
    low = tl.full((), -2139095041, tl.int64)
    high = tl.full((), 2139095041, tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        larger, equal = _reaching(logits, middle, VOCAB, VOCAB, BLOCK)
        enough = larger + equal >= top_k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    below = tl.full((), -1, tl.int32)
    at_most = tl.full((), VOCAB - 1, tl.int32)
    while at_most - below > 1:
        middle = (below + at_most) >> 1
        larger, equal = _reaching(logits, low, middle, VOCAB, BLOCK)
        enough = larger + equal >= top_k
        at_most = tl.where(enough, middle, at_most)
        below = tl.where(enough, below, middle)
    bits = low.to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), at_most


@triton.jit(do_not_specialize=["few"])
def _race_kernel(
    logits,
    best,
    numbers,
    values,
    ids,
    out,
    row_stride,
    few,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    numbers += program * _COLUMNS
    row = tl.load(numbers + _ROW).to(tl.int64)
    key0 = tl.load(numbers + _KEY0).to(tl.uint32, bitcast=True)
    key1 = tl.load(numbers + _KEY1).to(tl.uint32, bitcast=True)
    scale = tl.load(numbers + _SCALE).to(tl.float32, bitcast=True)
    reach = tl.load(numbers + _REACH).to(tl.float32, bitcast=True)
    top_p = tl.load(numbers + _TOP_P).to(tl.float32, bitcast=True)
    top_k = tl.load(numbers + _TOP_K)
    logits += row * row_stride
    best_id = tl.load(best + row).to(tl.int32)
    top = tl.load(logits + best_id).to(tl.float32)
    top = tl.where(top == top, top, 0.0) + 0.0
    top = tl.minimum(top, _LARGEST)
    cut = tl.full((), float("-inf"), tl.float32)
    cut_id = tl.full((), VOCAB, tl.int32)
    if top_k > 0:
        if top_k <= _FEW:
            cut = tl.load(values + program * few + top_k - 1)
            cut_id = tl.load(ids + program * few + top_k - 1)
        else:
            cut, cut_id = _kth(logits, top_k, VOCAB, BLOCK)
        cut_id += 1
    weight, drawn = _before(logits, cut, cut_id, top, scale, reach, key0, key1, VOCAB, BLOCK)
    if top_p < 1:
        limit = weight.to(tl.float64) * top_p.to(tl.float64)
        looking = drawn != _NO_ID
        while looking:
            cut = tl.load(logits + drawn).to(tl.float32)
            cut = tl.where(cut == cut, cut, 0.0) + 0.0
            cut = tl.minimum(cut, _LARGEST)
            weight, other = _before(logits, cut, drawn, top, scale, reach, key0, key1, VOCAB, BLOCK)
            looking = (weight.to(tl.float64) >= limit) & (other != _NO_ID)
            drawn = tl.where(looking, other, drawn)
    tl.store(out + program, tl.where(drawn == _NO_ID, best_id, drawn).to(tl.int64))


@triton.jit
def _mass_kernel(
    logits, best, token_ids, sums, ranks, row_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    top = number_of(logits, tl.load(best + row), True)
    own = number_of(logits, tl.load(token_ids + row), True)
    weight = tl.zeros((BLOCK,), tl.int64)
    larger = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, VOCAB, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < VOCAB
        x = number_of(logits, at, mask)
        distance = tl.minimum(top - tl.maximum(x, -_LARGEST), _DIFFERENCE) * _LOG2_E
        near = mask & (distance <= _FARTHEST) & (x >= -_LARGEST)
        distance = tl.minimum(tl.maximum(tl.where(near, distance, 0.0), 0.0), _FARTHEST)
        weight += tl.where(near, _exp2(-distance) * _UNIT, 0.0).to(tl.int64)
        larger += (mask & (x > own)).to(tl.int32)
    tl.store(sums + row, tl.sum(weight, axis=0))
    tl.store(ranks + row, tl.sum(larger, axis=0).to(tl.int64))


def likelihoods(
    logits: torch.Tensor, best: torch.Tensor, token_ids: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what ops/sampling/race.py does, bit for bit, in a pass for sums and two for the most likely."""
    num, device = len(logits), logits.device
    sums, ranks = torch.empty(2, num, dtype=torch.int64, device=device).unbind(0)
    if num:
        _mass_kernel[(num,)](
            logits,
            best,
            token_ids,
            sums,
            ranks,
            logits.stride(0),
            VOCAB=logits.shape[-1],
            BLOCK=_BLOCK,
            num_warps=8,
            enable_fp_fusion=False,
        )
    wanted = torch.full((2, num), count, dtype=torch.int32, device=device)
    torch.arange(num, dtype=torch.int32, device=device, out=wanted[0])
    values, ids = largest(logits, wanted[0], wanted[1], count)
    return sums, ranks, values, ids


def race(logits: torch.Tensor, best: torch.Tensor, rows: RaceRows) -> torch.Tensor:
    """Draw a token from each of some rows: the tokens of ops/sampling/race.py. Waits for nothing.

    Args:
        logits: [num_rows, vocab], fp32, fp16 or bf16; rows may lie apart, each is contiguous.
        best: [num_rows] int64, the likeliest token of each row.

    Returns:
        [num_drawn] int64, valid ids whatever the logits are.
    """
    numbers = rows.numbers
    num = len(numbers)
    out = torch.empty(num, dtype=torch.int64, device=logits.device)
    values, ids = numbers.view(torch.float32), numbers
    if rows.few:
        values, ids = largest(logits, numbers[:, plain.ROW], numbers[:, plain.TOP_K], rows.few)
    if num:
        _race_kernel[(num,)](
            logits,
            best,
            numbers,
            values,
            ids,
            out,
            logits.stride(0),
            rows.few,
            VOCAB=logits.shape[-1],
            BLOCK=_BLOCK,
            num_warps=8,
            # A product and an addition in one are rounded once: not the tokens of the reference.
            enable_fp_fusion=False,
        )
    return out
