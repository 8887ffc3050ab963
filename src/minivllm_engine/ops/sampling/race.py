"""A draw as a race: each token gets a random time, the sooner the likelier it is, and the first one wins.

A token's time is E * 2^distance: E is an exponential variate made of a hash of (seed, output, position, token
id), and 2^-distance its probability beside that of the likeliest token. The first of all tokens is a draw
from the softmax; the first of some of them is one from what truncation leaves, renormalised. So nothing
is sorted or summed to draw. The numbers are made of additions and products alone, each of which every device
rounds in the same way, and sums are of integers: the kernel and this page give the same tokens bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minivllm_engine.tensors.device_copy import fp32, on_device

# 2^f = 1 + f * R(f) for f in [0, 1): relative error 2e-8.
EXP2 = (
    6.93147171e-01,
    2.40227215e-01,
    5.54959362e-02,
    9.65244059e-03,
    1.26893528e-03,
    2.08291903e-04,
)
# -log2(1 - t / 2) = t * Q(t) for t in (0, 1]: relative error 3e-8.
LOG2 = (
    *(0.72134754, 0.18033429, 0.06017888, 0.02189059, 0.01216598),
    *(-0.00461076, 0.01420165, -0.00957288, 0.00406469),
)
LOG2_E = 1.4426950408889634
GOLDEN, MUL1, MUL2 = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
# Beyond so many halvings a token cannot be drawn.
FARTHEST = 126.0
# Weights are integers, this many of them to the likeliest token's.
UNIT = 2.0**40
# Logits count as at most this large, what is below its negative cannot be drawn, and a difference is at most
# DIFFERENCE: nothing overflows, whatever the temperature.
LARGEST, DIFFERENCE = 1.5e38, 1e20
# A row with a top-k of at most this is cut at one of so many of its largest logits.
FEW = 128
_MASK64 = 2**64 - 1
# Columns of `RaceRows.numbers`.
ROW, KEY0, KEY1, SCALE, REACH, TOP_P, TOP_K = range(7)
COLUMNS = 7


@dataclass(frozen=True, slots=True)
class RaceRows:
    """Which rows are drawn from, and how.

    Attributes:
        numbers: [num_drawn, 7] int32 on the logits' device: the row of the logits, two words of the row's
            random key, and as bits of fp32 log2(e) / temperature, the most halvings that min-p leaves, and
            top-p; then top-k, 0 for none.
        few: the largest top-k that is not over FEW; 0 where there is none.
        cuts: has any of the rows a top-p or a top-k?
        only_few: have all of them a top-k that is not over FEW?
    """

    numbers: torch.Tensor
    few: int
    cuts: bool
    only_few: bool

    @classmethod
    def build(
        cls,
        rows: Sequence[int],
        keys: np.ndarray,
        temperature: Sequence[float],
        min_p: Sequence[float],
        top_p: Sequence[float],
        top_k: Sequence[int],
        *,
        vocab: int,
        device: torch.device,
    ) -> "RaceRows":
        """Pack the parameters of rows, all of which have a temperature. keys: [num_drawn] uint64."""
        numbers = np.empty((len(rows), COLUMNS), dtype=np.int32)
        numbers[:, ROW] = rows
        numbers[:, KEY0] = (keys & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
        numbers[:, KEY1] = (keys >> np.uint64(32)).astype(np.uint32).view(np.int32)
        with np.errstate(over="ignore", divide="ignore"):
            scale = np.float64(LOG2_E) / np.array(temperature, dtype=np.float64)
            reach = np.minimum(-np.log2(np.array(min_p, dtype=np.float64)), FARTHEST)
        numbers[:, SCALE] = np.clip(scale, 1e-37, 1e18).astype(np.float32).view(np.int32)
        numbers[:, REACH] = reach.astype(np.float32).view(np.int32)
        ps = np.array(top_p, dtype=np.float32)
        numbers[:, TOP_P] = ps.view(np.int32)
        ks = np.array([min(k, vocab) for k in top_k], dtype=np.int32)
        ks = np.where((ks > 0) & (ks < vocab), ks, 0)
        numbers[:, TOP_K] = ks
        few = int(np.where(ks <= FEW, ks, 0).max(initial=0))
        packed = on_device(numbers.ravel(), torch.int32, device).view(-1, COLUMNS)
        cuts = bool((ks > 0).any() or (ps < 1).any())
        return cls(packed, few, cuts, bool(((ks > 0) & (ks <= FEW)).all()))


def race(logits: torch.Tensor, best: torch.Tensor, rows: RaceRows) -> torch.Tensor:
    """Draw a token from each of some rows. Waits for nothing on a GPU.

    Top-k first, then top-p of what it leaves, then min-p. Of equal logits the smallest id comes first; the
    likeliest token always stays.

    Args:
        logits: [num_rows, vocab], any float dtype; NaN counts as 0, and -inf cannot be drawn.
        best: [num_rows] int64, the likeliest token of each row.

    Returns:
        [num_drawn] int64, valid ids whatever the logits are.
    """
    numbers = rows.numbers
    at = numbers[:, ROW].long()
    values = fp32(logits.index_select(0, at))
    values = torch.where(values.isnan(), 0.0, values).clamp(max=LARGEST)
    winner = best.index_select(0, at)[:, None]
    ids = torch.arange(values.shape[-1], device=values.device).expand_as(values)
    top = values.gather(1, winner)
    if rows.cuts:
        # As far as it goes both are the same order, so that nobody's draw depends on the others.
        values, ids = largest(values, rows.few if rows.only_few else values.shape[-1])
    behind = (top - values.clamp(min=-LARGEST)).clamp(max=DIFFERENCE)
    distance = behind * _floats(numbers, SCALE)
    kept = (distance <= FARTHEST) & (values >= -LARGEST)
    if rows.cuts:
        kept &= _kept(distance, kept, numbers)
    kept &= distance <= _floats(numbers, REACH)
    time = waits(ids, numbers) * exp2(distance.clamp(0, FARTHEST))
    time = torch.where(kept, time, torch.inf)
    first = time.amin(dim=-1, keepdim=True)
    nobody = logits.shape[-1]
    fastest = torch.where(kept & (time == first), ids, nobody).amin(dim=-1, keepdim=True)
    return torch.where(fastest < nobody, fastest, winner).squeeze(1)


def largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first `count` values, fp32, and ids of a stable descending sort of rows without NaN."""
    vocab = values.shape[-1]
    if count * 4 > vocab:
        ordered, ids = values.sort(dim=-1, descending=True, stable=True)
        return ordered[:, :count], ids[:, :count]
    # As integers floats are in order, but for the negative ones, whose order is reversed, and -0.
    bits = (values + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    # Of equal values the one with the smallest id has the largest key.
    backwards = torch.arange(vocab - 1, -1, -1, device=values.device)
    keys = (ordered.long() << 32) | backwards
    ids = vocab - 1 - (keys.topk(count).values & 0xFFFFFFFF)
    return values.gather(1, ids), ids


def _kept(distance: torch.Tensor, possible: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """What top-k and top-p leave of tokens in order. All are [num_drawn, width]."""
    rank = torch.arange(distance.shape[-1], device=distance.device)
    top_k = numbers[:, TOP_K, None]
    kept = (top_k == 0) | (rank < top_k)
    top_p = _floats(numbers, TOP_P)
    weight = weights(distance, possible & kept)
    before = weight.cumsum(dim=-1) - weight
    limit = weight.sum(dim=-1, keepdim=True).double() * top_p.double()
    return kept & ((top_p >= 1) | (before.double() < limit) | (rank == 0))


def likelihoods(
    logits: torch.Tensor, best: torch.Tensor, token_ids: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what the logprobs of a token and of the most likely ones are made of.

    Args:
        logits: [num_rows, vocab], any float dtype.
        best, token_ids: [num_rows] int64, the likeliest token and the one that is told of.
        count: of the most likely ones.

    Returns:
        sums [num_rows] int64, of e^(logit - largest logit) in units of UNIT; ranks [num_rows] int64, how many
        logits are larger than the token's; values fp32 and ids, [num_rows, count] from the largest down.
    """
    values = fp32(logits)
    values = torch.where(values.isnan(), 0.0, values).clamp(max=LARGEST)
    top, own = values.gather(1, best[:, None]), values.gather(1, token_ids[:, None])
    behind = (top - values.clamp(min=-LARGEST)).clamp(max=DIFFERENCE)
    distance = behind * LOG2_E
    near = (distance <= FARTHEST) & (values >= -LARGEST)
    return weights(distance, near).sum(dim=-1), (values > own).sum(dim=-1), *largest(values, count)


def weights(distance: torch.Tensor, possible: torch.Tensor) -> torch.Tensor:
    """Return 2^-distance in units of UNIT, int64, so that sums do not depend on their order."""
    near = exp2(-distance.clamp(0, FARTHEST)) * UNIT
    return torch.where(possible, near, 0.0).long()


def _floats(numbers: torch.Tensor, column: int) -> torch.Tensor:
    return numbers[:, column].contiguous().view(torch.float32)[:, None]


def exp2(x: torch.Tensor) -> torch.Tensor:
    """2^x of fp32 in [-126, 126], by additions and products that every device rounds alike."""
    whole = x.floor()
    part = x - whole
    series = torch.full_like(part, EXP2[-1])
    for factor in EXP2[-2::-1]:
        series = series * part + factor
    series = series * part + 1.0
    return series * ((whole.int() + 127) << 23).view(torch.float32)


def waits(ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return exponential variates (in units of ln 2), fp32 > 0, of tokens [num_drawn, width] by their ids."""
    x = ids.int() * _int32(GOLDEN) + numbers[:, KEY0, None]
    x = (x ^ _shifted(x, 16)) * _int32(MUL1) + numbers[:, KEY1, None]
    x = (x ^ _shifted(x, 15)) * _int32(MUL2)
    x = x ^ _shifted(x, 16)
    # The hash is a fixed point number v in (0, 1), and its variate -log2(1 - v).
    lower = x >= 0
    near = torch.where(lower, x, ~x).float() + 0.5
    bits = near.view(torch.int32)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32)
    t = torch.where(lower, near * 2.0**-31, 2.0 - mantissa)
    halvings = torch.where(lower, 0, 31 - ((bits >> 23) - 127)).float()
    series = torch.full_like(t, LOG2[-1])
    for factor in LOG2[-2::-1]:
        series = series * t + factor
    found: torch.Tensor = series * t + halvings
    return found


def _int32(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros coming in."""
    found: torch.Tensor = (x >> bits) & (2 ** (32 - bits) - 1)
    return found


def row_keys(bases: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Return the random key of each row, [num_rows] uint64. bases: see `key_base`."""
    state = np.array(bases, dtype=np.uint64) + np.array(positions, dtype=np.uint64)
    return _mixed(state)


def key_base(seed: int, index: int) -> int:
    """Return what of a row's key is the same at all positions. index: number of the output."""
    state = _mixed(np.array([seed & _MASK64], dtype=np.uint64))
    return int(_mixed(state + np.uint64(index))[0])


def _mixed(value: np.ndarray) -> np.ndarray:
    """SplitMix64's mixer."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = value ^ (value >> np.uint64(31))
    return mixed
