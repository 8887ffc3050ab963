"""Among how many programs a decode is split, and which tiles a prompt gets."""

import pytest
import torch

from minivllm_engine.ops.attention.reference import KVShape
from minivllm_engine.ops.attention.tiles import num_splits, prefill_tile
from minivllm_engine.ops.device import DeviceLimits

SMALL, LARGE = DeviceLimits(99 * 1024, 82), DeviceLimits(227 * 1024, 132)


@pytest.mark.parametrize("limits", [SMALL, LARGE], ids=["small", "large"])
def test_splits_fall_with_the_batch_and_grow_with_the_context(limits: DeviceLimits) -> None:
    by_batch = [num_splits(n, 2, 100_000, limits) for n in (1, 2, 8, 64, 256, 1024)]
    assert by_batch == sorted(by_batch, reverse=True) and by_batch[-1] == 1
    by_context = [num_splits(1, 2, n, limits) for n in (1, 128, 129, 1000, 5000, 100_000)]
    assert by_context == sorted(by_context)
    assert by_context[:2] == [1, 1] and by_context[2] == 2
    for splits in by_batch + by_context:
        assert splits & (splits - 1) == 0


def test_a_large_card_gets_work_for_all_of_it_from_one_long_context() -> None:
    """With 2 key/value heads, one sequence alone fills 132 multiprocessors."""
    assert num_splits(1, 2, 32_768, LARGE) * 2 >= LARGE.num_processors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(8, 2), (6, 2), (16, 1), (40, 1), (200, 1)], ids=str)
@pytest.mark.parametrize("limits", [SMALL, LARGE], ids=["small", "large"])
def test_a_tile_has_a_row_for_each_head_of_its_tokens(
    limits: DeviceLimits, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    group = heads[0] // heads[1]
    for head_dim in (64, 128, 256):
        tile = prefill_tile(KVShape(64, *heads, head_dim), dtype, limits)
        assert tile.num_tokens >= 1
        assert tile.num_tokens * group <= tile.num_rows < (tile.num_tokens + 1) * group
        assert tile.num_rows & (tile.num_rows - 1) == 0
