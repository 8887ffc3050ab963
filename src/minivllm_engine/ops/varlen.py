"""Where the sequences of a packed batch lie, as kernels read it: copied to the device once a step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minivllm_engine.tensors.device_copy import on_device


def number_parts(lengths: np.ndarray, size: int) -> np.ndarray:
    """Cut sequences into parts of `size` tokens: [num_parts, 2], a sequence and which of its parts, in order.

    Args:
        lengths: [num_seqs], at least 1.
    """
    counts = -(-lengths // size)
    seqs = np.repeat(np.arange(len(lengths)), counts)
    return np.stack((seqs, np.arange(len(seqs)) - (np.cumsum(counts) - counts)[seqs]), axis=1)


def cut_tiles(starts: np.ndarray, lengths: np.ndarray, size: int) -> np.ndarray:
    """Cut sequences into tiles: [num_tiles, 2], a sequence and the first of its new tokens in the tile.

    Those with the most tokens before them come first: under causal attention they take longest, and what is
    started last should be short.

    Args:
        starts, lengths: [num_seqs], tokens of each that came before, and new ones.
    """
    tiles = number_parts(lengths, size) * (1, size)
    return tiles[np.argsort(-(starts[tiles[:, 0]] + tiles[:, 1]), kind="stable")]


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
        bounds = np.cumsum((first_row, *lengths))
        tiles = cut_tiles(np.array(starts), np.array(lengths), tile_size)
        sizes = [len(bounds), len(starts), tiles.size]
        flat = np.concatenate((bounds, np.array(starts), tiles.ravel()))
        parts = on_device(flat, torch.int32, device).split_with_sizes(sizes)
        return cls(parts[0], parts[1], parts[2].view(-1, 2))
