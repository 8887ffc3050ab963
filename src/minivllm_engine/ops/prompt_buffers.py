"""What a step of prompt chunks reads, at fixed places on the device, so that a CUDA graph can be replayed.

A bucket is a number of tokens and of sequences that a graph is captured for; a step is padded to one. All
buckets share the places: each sees the first numbers of everything. A bucket has one lane more than
sequences, which is always nobody's: what pads lists of tiles points to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from minivllm_engine.ops.varlen import PackedSequences, cut_tiles, number_parts

NOBODY = -1
# Tokens of a chunk of the delta rule.
CHUNK = 64
# No tile is shorter, and no more than two sizes of them are in use.
_SHORTEST_TILE, _TILE_SIZES = 2, 2
_ALIGNED = 4


class Bucket(NamedTuple):
    """A step's size: tokens, and sequences they may belong to."""

    num_tokens: int
    num_seqs: int


@dataclass(frozen=True, slots=True)
class PromptStep:
    """The numbers of a step, on the host. N sequences of at least one token each.

    Attributes:
        token_ids, positions, kv_slots: [num_tokens]; see ModelInput.
        slots, starts, lengths: [N].
        logits_rows: rows whose logits are wanted.
        tables: block tables of the sequences.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    kv_slots: np.ndarray
    slots: Sequence[int]
    starts: Sequence[int]
    lengths: Sequence[int]
    logits_rows: Sequence[int]
    tables: Sequence[Sequence[int]]


class PromptBuffers:
    """The places of all numbers in one tensor of int32, and the block tables in another.

    Attributes:
        numbers: [size] int32; tables: [max_seqs + 1, max_blocks] int32. Both on the device.
    """

    def __init__(self, largest: Bucket, max_blocks: int, device: torch.device) -> None:
        tokens, lanes = largest.num_tokens, largest.num_seqs + 1
        self._lanes = lanes
        self._places: dict[str, slice] = {}
        self._end = 0
        for name in ("token_ids", "positions", "kv_slots"):
            self._reserve(name, tokens)
        for name in ("slots", "starts", "logits_rows"):
            self._reserve(name, lanes)
        for name in ("bounds", "chunk_offsets"):
            self._reserve(name, lanes + 1)
        self._reserve("chunks", 2 * (tokens // CHUNK + lanes))
        self._largest = largest
        self._tile_sizes: dict[int, str] = {}
        spare = _TILE_SIZES * (2 * (tokens // _SHORTEST_TILE + lanes) + _ALIGNED)
        self.numbers = torch.zeros(self._end + spare, dtype=torch.int32, device=device)
        self.tables = torch.zeros(lanes, max_blocks, dtype=torch.int32, device=device)

    def _reserve(self, name: str, count: int) -> None:
        self._places[name] = slice(self._end, self._end + count)
        # Kernels are compiled anew for pointers that are aligned in another way.
        self._end += -(-count // _ALIGNED) * _ALIGNED

    def first(self, name: str, count: int) -> torch.Tensor:
        """See the first numbers of a kind: [count]."""
        place = self._places[name]
        assert count <= place.stop - place.start
        return self.numbers[place][:count]

    def tiles(self, size: int, count: int) -> torch.Tensor:
        """See the first tiles of `size` tokens: [count, 2], as in PackedSequences."""
        if size not in self._tile_sizes:
            assert size >= _SHORTEST_TILE and len(self._tile_sizes) < _TILE_SIZES
            self._tile_sizes[size] = f"tiles of {size}"
            self._reserve(
                self._tile_sizes[size], 2 * (self._largest.num_tokens // size + self._lanes)
            )
        return self.first(self._tile_sizes[size], 2 * count).view(-1, 2)

    def bucket(self, bucket: Bucket) -> "PromptBucket":
        """See what a step of this bucket reads."""
        return PromptBucket(self, bucket)

    def write(self, step: PromptStep, bucket: Bucket, numbers: np.ndarray) -> None:
        """Write the numbers of a step to `numbers`, which lies as the tensor does, padded to a bucket."""

        def put(name: str, values: np.ndarray | Sequence[int], padding: int) -> None:
            place = numbers[self._places[name]]
            place[: len(values)] = values
            place[len(values) :] = padding

        starts, lengths = np.array(step.starts), np.array(step.lengths)
        num_rows, nobody = int(lengths.sum()), bucket.num_seqs
        assert num_rows == len(step.token_ids) <= bucket.num_tokens
        assert len(lengths) <= bucket.num_seqs
        put("token_ids", step.token_ids, 0)
        put("positions", step.positions, 0)
        put("kv_slots", step.kv_slots, NOBODY)
        put("slots", step.slots, NOBODY)
        put("starts", step.starts, 0)
        put("logits_rows", step.logits_rows, 0)
        put("bounds", np.concatenate(([0], np.cumsum(lengths))), num_rows)
        counts = -(-lengths // CHUNK)
        put("chunk_offsets", np.concatenate(([0], np.cumsum(counts))), int(counts.sum()))
        self._put_pairs(numbers, "chunks", number_parts(lengths, CHUNK), nobody)
        for size, name in self._tile_sizes.items():
            self._put_pairs(numbers, name, cut_tiles(starts, lengths, size), NOBODY)

    def _put_pairs(self, numbers: np.ndarray, name: str, pairs: np.ndarray, padding: int) -> None:
        place = numbers[self._places[name]].reshape(-1, 2)
        place[: len(pairs)] = pairs
        place[len(pairs) :] = padding, 0


class PromptBucket:
    """What the operations of a step of one bucket read.

    Attributes:
        token_ids, positions, kv_slots: [num_tokens]; KV slots of rows past the end are negative.
        slots, starts: [num_seqs + 1]; the slots of lanes without a sequence are negative.
        bounds: [num_seqs + 2], the first row of each lane, and one past the last row.
        logits_rows: [num_seqs], rows whose logits are wanted, then any.
        block_tables: [num_seqs + 1, max_blocks].
        chunks: [any, 2], a lane and which of its chunks of 64 tokens, in order; then those of nobody.
        chunk_offsets: [num_seqs + 2], the first chunk of each lane, and one past the last.
    """

    def __init__(self, buffers: PromptBuffers, bucket: Bucket) -> None:
        tokens, lanes = bucket.num_tokens, bucket.num_seqs + 1
        self.device = buffers.numbers.device
        self.num_tokens = tokens
        self._buffers, self._lanes = buffers, lanes
        self.token_ids = buffers.first("token_ids", tokens)
        self.positions = buffers.first("positions", tokens)
        self.kv_slots = buffers.first("kv_slots", tokens)
        self.slots = buffers.first("slots", lanes)
        self.starts = buffers.first("starts", lanes)
        self.bounds = buffers.first("bounds", lanes + 1)
        self.logits_rows = buffers.first("logits_rows", bucket.num_seqs)
        self.block_tables = buffers.tables[:lanes]
        self.chunks = buffers.first("chunks", 2 * (tokens // CHUNK + lanes)).view(-1, 2)
        self.chunk_offsets = buffers.first("chunk_offsets", lanes + 1)

    def packed(self, tile_size: int) -> PackedSequences:
        """See the chunks as sequences that are cut into tiles."""
        count = self.num_tokens // tile_size + self._lanes
        return PackedSequences(self.bounds, self.starts, self._buffers.tiles(tile_size, count))
