"""How large the tiles of the attention kernels are, and among how many programs a decode is split."""

import math
from dataclasses import dataclass

import torch

from minivllm_engine.ops.attention.reference import KVShape
from minivllm_engine.ops.device import DeviceLimits

# A split of a decode's keys is at least so long.
MIN_SPLIT = 128
_MAX_SPLITS = 128
_PROGRAMS_PER_PROCESSOR = 4
# A matrix product in Triton has at least so many rows and columns.
_MIN_PRODUCT = 16


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """What one program works on at a time.

    Attributes:
        num_tokens: queries, each with all heads of its group.
        num_rows: of the products: num_tokens times the heads of a group, or a few more.
        num_keys: keys.
        num_warps: warps that share the work.
        num_stages: how far loads are ahead of products.
    """

    num_tokens: int
    num_rows: int
    num_keys: int
    num_warps: int
    num_stages: int = 2


def prefill_tile(shape: KVShape, dtype: torch.dtype, limits: DeviceLimits) -> PrefillTile:
    """Return the largest tile that was found to keep its sums in registers and its keys in shared memory."""
    group = shape.num_heads // shape.num_kv_heads
    stages = 2
    if dtype == torch.float32:
        rows, keys, warps = 32, 16, 8
    elif shape.head_dim <= 128:
        rows, keys, warps = 128, 64, 8
    elif limits.shared_memory > 200 * 1024:
        # On an H200 3 stages were a tenth faster than 2, and took no more shared memory.
        rows, keys, warps, stages = 128, 64, 8, 3
    else:
        rows, keys, warps = 64, 32, 4
    rows = max(rows, 1 << (group - 1).bit_length())
    return PrefillTile(rows // group, rows, keys, warps, stages)


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """What one program of a decode works on at a time: keys, and the warps that share the work."""

    num_keys: int
    num_warps: int


def decode_tile(head_dim: int, dtype: torch.dtype) -> DecodeTile:
    return DecodeTile(32 if head_dim > 128 or dtype == torch.float32 else 64, num_warps=4)


def num_splits(num_seqs: int, num_kv_heads: int, longest: int, limits: DeviceLimits) -> int:
    """Choose among how many programs the keys of each of `num_seqs` decodes are split: a power of two.

    Enough to keep the card busy, and so few that each has at least 128 keys of the longest context.
    """
    wanted = _PROGRAMS_PER_PROCESSOR * limits.num_processors // (num_seqs * num_kv_heads)
    useful = -(-longest // MIN_SPLIT)
    splits = 1
    while 2 * splits <= min(wanted, useful, _MAX_SPLITS):
        splits *= 2
    return splits


def padded_size(size: int) -> int:
    """Round up to the rows or columns of a matrix product that has at least `size`: a power of two."""
    return max(_MIN_PRODUCT, 1 << (size - 1).bit_length())


def softmax_scale(head_dim: int) -> float:
    """Return what makes of a product of query and key a power of two in the softmax."""
    return math.log2(math.e) / math.sqrt(head_dim)
