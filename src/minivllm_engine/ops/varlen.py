"""Where the sequences of a packed batch lie, as kernels read it: copied to the device once a step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minivllm_engine.tensors.device_copy import on_device


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Sequences of several tokens each, packed one after the other, cut into tiles of tokens.

    Attributes:
        bounds: [num_seqs + 1] int32, the first row of each sequence, and one past the last row of all.
        starts: [num_seqs] int32, tokens of each sequence that came before.
        tiles: [num_tiles, 2] int32, a sequence and the first of its new tokens that is in the tile. The
            sequence is -1 where the tile is padding.
    """

    bounds: torch.Tensor
    starts: torch.Tensor
    tiles: torch.Tensor

    @classmethod
    def build(
        cls,
        starts: Sequence[int],
        lengths: Sequence[int],
        tile_size: int,
        device: torch.device,
        *,
        first_row: int = 0,
    ) -> "PackedSequences":
        """Cut sequences into tiles, the ones with the most tokens before them first.

        Args:
            starts: tokens of each sequence that came before.
            lengths: new tokens of each, at least 1, in the order of the rows.
            tile_size: tokens of a tile.
            first_row: where in the batch the first sequence begins.
        """
        bounds = [first_row]
        tiles = []
        for seq, length in enumerate(lengths):
            bounds.append(bounds[-1] + length)
            tiles += [(seq, first) for first in range(0, length, tile_size)]
        # Under causal attention these take longest, and what is started last should be short.
        tiles.sort(key=lambda tile: -(starts[tile[0]] + tile[1]))
        flat = [*bounds, *starts, *(number for tile in tiles for number in tile)]
        sizes = [len(bounds), len(starts), 2 * len(tiles)]
        parts = on_device(flat, torch.int32, device).split_with_sizes(sizes)
        return cls(parts[0], parts[1], parts[2].view(-1, 2))
