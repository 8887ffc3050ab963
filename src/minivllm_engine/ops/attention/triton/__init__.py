"""Grouped-query attention over a paged KV cache in Triton: see ../reference.py for letters and layouts.

A program works for one key/value head on a tile of rows, a row being a query head of a token, so that all R
heads of a group share what is read. Decodes split their keys among programs, whose parts are then combined.
Only positions of the sequence are read: blocks hold whatever others have left in them.
"""

from dataclasses import dataclass

import torch

from minivllm_engine.ops.attention.reference import KVShape
from minivllm_engine.ops.attention.tiles import PrefillTile, num_splits, prefill_tile
from minivllm_engine.ops.attention.triton.decode import decode
from minivllm_engine.ops.attention.triton.prefill import prefill
from minivllm_engine.ops.device import device_limits
from minivllm_engine.ops.varlen import PackedSequences
from minivllm_engine.tensors.model_input import ModelInput


@dataclass(frozen=True, slots=True)
class TritonAttentionPlan:
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
    def build(cls, batch: ModelInput, shape: KVShape, dtype: torch.dtype) -> "TritonAttentionPlan":
        """Plan a step. `dtype` is that of queries and cache."""
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


def paged_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: TritonAttentionPlan
) -> torch.Tensor:
    """Attend causally for all tokens of a step, whose own keys and values are in the cache already.

    Args:
        q: [num_tokens, H, d]; rows may lie apart, each is contiguous.
        keys, values: [num_blocks, block_size, G, d], of q's dtype; block_size a multiple of 16.
        plan: made for this step.

    Returns:
        [num_tokens, H, d] in q's dtype.
    """
    out = q.new_empty(q.shape)
    cut = plan.num_decodes
    if cut:
        decode(
            q[:cut],
            keys,
            values,
            out,
            block_tables=plan.block_tables,
            positions=plan.positions,
            splits=plan.num_splits,
        )
    if plan.prefill is not None:
        tables = plan.block_tables[cut:]
        prefill(q, keys, values, out, block_tables=tables, sequences=plan.prefill, tile=plan.tile)
    return out
