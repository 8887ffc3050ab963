"""Attention of prompts and chunks by the FlashAttention-2 that torch contains, over gathered keys.

It knows no blocks, so keys and values of each context are copied together first. That costs a layer as much
scratch memory as the contexts take in the cache: 1 KiB a token and key/value head of 256 in bf16.
torch does not document the operation: whether it is there, and takes what is given, is told by its schema.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from minivllm_engine.device_copy import on_device

_ARGUMENTS = (
    "query",
    "key",
    "value",
    "cum_seq_q",
    "cum_seq_k",
    "max_q",
    "max_k",
    "dropout_p",
    "is_causal",
    "return_debug_mask",
)
_LEAST_CAPABILITY = (8, 0)
_HEAD_GRAIN, _LARGEST_HEAD = 8, 256


@functools.cache
def _schema_is_known() -> bool:
    """Does torch have the operation, with the arguments that are given here, and none more that it needs?"""
    operation = getattr(torch.ops.aten, "_flash_attention_forward", None)
    if operation is None:
        return False
    arguments = operation.default._schema.arguments
    given, others = arguments[: len(_ARGUMENTS)], arguments[len(_ARGUMENTS) :]
    return tuple(argument.name for argument in given) == _ARGUMENTS and all(
        argument.has_default_value() for argument in others
    )


def can_prefill(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Does torch's FlashAttention-2 compute this on this device?"""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
        and dtype in (torch.float16, torch.bfloat16)
        and head_dim % _HEAD_GRAIN == 0
        and head_dim <= _LARGEST_HEAD
        and _schema_is_known()
    )


@dataclass(frozen=True, slots=True)
class GatheredSequences:
    """Sequences of several tokens each, packed one after the other, and where their contexts lie.

    Attributes:
        rows: the rows of the batch that are theirs.
        query_bounds: [num_seqs + 1] int32, the first row of each, counted from the first of them all.
        key_bounds: [num_seqs + 1] int32, sums of their contexts.
        key_rows: [sum of contexts] int64, where in a cache seen as [num_rows, G, d] each position lies.
        longest, longest_context: of the sequences.
    """

    rows: slice
    query_bounds: torch.Tensor
    key_bounds: torch.Tensor
    key_rows: torch.Tensor
    longest: int
    longest_context: int

    @classmethod
    def build(
        cls,
        starts: Sequence[int],
        lengths: Sequence[int],
        block_tables: torch.Tensor,
        block_size: int,
        *,
        first_row: int = 0,
    ) -> "GatheredSequences":
        """Find the contexts of some sequences. Waits for nothing.

        Args:
            starts: tokens of each sequence that came before.
            lengths: new tokens of each, at least 1, in the order of the rows.
            block_tables: [num_seqs, max_blocks] integers.
            first_row: where in the batch the first sequence begins.
        """
        device = block_tables.device
        contexts = [start + length for start, length in zip(starts, lengths, strict=True)]
        total = sum(contexts)
        bounds = [*accumulate(lengths, initial=0), *accumulate(contexts, initial=0)]
        query_bounds, key_bounds = on_device(bounds, torch.int32, device).chunk(2)
        sequence = torch.repeat_interleave(
            torch.arange(len(contexts), device=device), key_bounds.diff(), output_size=total
        )
        position = torch.arange(total, device=device) - key_bounds[sequence]
        block = block_tables[sequence, position // block_size].long()
        return cls(
            slice(first_row, first_row + sum(lengths)),
            query_bounds,
            key_bounds,
            block * block_size + position % block_size,
            max(lengths),
            max(contexts),
        )


def prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    *,
    sequences: GatheredSequences,
) -> None:
    """Write the rows of packed sequences into `out`.

    Args:
        q, out: [num_tokens, H, d]; out is contiguous, rows of q may lie apart.
        keys, values: [num_blocks, block_size, G, d], of q's dtype, and `can_prefill`.
        sequences: some of the batch's.
    """
    key, value = (
        cache.flatten(0, 1).index_select(0, sequences.key_rows) for cache in (keys, values)
    )
    attended = torch.ops.aten._flash_attention_forward(
        q[sequences.rows],
        key,
        value,
        sequences.query_bounds,
        sequences.key_bounds,
        sequences.longest,
        sequences.longest_context,
        0.0,
        True,
        False,
    )[0]
    out[sequences.rows].copy_(attended)
