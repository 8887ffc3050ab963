"""How packed sequences are cut into tiles for kernels."""

import pytest
import torch

from minivllm_engine.ops.varlen import PackedSequences

CPU = torch.device("cpu")


@pytest.mark.parametrize("tile_size", [1, 5, 16, 64])
def test_every_token_is_in_one_tile_and_the_longest_context_comes_first(tile_size: int) -> None:
    starts, lengths = (0, 100, 7, 0), (65, 3, 64, 1)
    packed = PackedSequences.build(starts, lengths, tile_size, CPU, first_row=6)
    assert packed.bounds.tolist() == [6, 71, 74, 138, 139]
    assert packed.starts.tolist() == list(starts)
    seen = [
        (seq, token)
        for seq, first in packed.tiles.tolist()
        for token in range(first, min(first + tile_size, lengths[seq]))
    ]
    assert sorted(seen) == [(seq, token) for seq in range(4) for token in range(lengths[seq])]
    contexts = [starts[seq] + first for seq, first in packed.tiles.tolist()]
    assert contexts == sorted(contexts, reverse=True)


def test_nothing_is_shared_between_two_steps() -> None:
    first, second = (PackedSequences.build((0,), (5,), 4, CPU) for _ in range(2))
    second.bounds.zero_()
    assert first.bounds.tolist() == [0, 5]
