"""Small-batch products against the reference, in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

from minivllm_engine.ops.device import DeviceLimits
from minivllm_engine.ops.small_batch import triton
from minivllm_engine.ops.small_batch.tiles import MAX_ROWS, TILES, Tile, choose_tile
from support.kernel_checks import needs_interpreter, small_batch

pytestmark = needs_interpreter

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Neither in nor out is a multiple of it.
SMALL = Tile(32, 64)


@all_dtypes
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
def test_products_of_a_norm(num_rows: int, dtype: torch.dtype) -> None:
    small_batch.check_norm_linear(CPU, dtype, num_rows, 96, 200, bias=num_rows == 3, tile=SMALL)


@all_dtypes
def test_products_of_a_norm_in_the_chosen_tiles(dtype: torch.dtype) -> None:
    small_batch.check_norm_linear(CPU, dtype, 1, 1032, 72)


@all_dtypes
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
def test_products_added_to_a_residual(num_rows: int, dtype: torch.dtype) -> None:
    small_batch.check_linear_add(CPU, dtype, num_rows, 72, 200, bias=num_rows == 2, tile=SMALL)


@all_dtypes
@pytest.mark.parametrize("num_rows", [1, 3])
def test_products_of_gated_heads(num_rows: int, dtype: torch.dtype) -> None:
    """Heads of powers of two, smaller than a tile and larger, and others, with gaps between them."""
    for num_heads, size in [(6, 16), (3, 128), (5, 24), (1, 40)]:
        small_batch.check_gated_products(CPU, dtype, num_rows, num_heads, size, 72, tile=SMALL)


def test_most_rows() -> None:
    small_batch.check_norm_linear(CPU, torch.float32, MAX_ROWS, 96, 24, tile=SMALL)
    small_batch.check_linear_add(CPU, torch.float32, MAX_ROWS - 1, 96, 24, tile=SMALL)
    small_batch.check_gated_products(CPU, torch.float32, MAX_ROWS, 3, 24, 24, tile=SMALL)


def test_more_rows_are_refused() -> None:
    x = torch.zeros(MAX_ROWS + 1, 16)
    with pytest.raises(ValueError, match="9 rows"):
        triton.linear_add_(x, torch.zeros(16, 16), x)


@pytest.mark.parametrize(("num_outputs", "rows"), [(248320, 8), (8224, 8), (2048, 4), (1024, 2)])
def test_every_multiprocessor_has_two_programs(num_outputs: int, rows: int) -> None:
    """On an H200; products with fewer outputs are cut finer."""
    tile = choose_tile(num_outputs, 1024, DeviceLimits(227 * 1024, 132))
    assert tile.num_outputs == rows
    assert tile.num_inputs == 1024
    assert num_outputs / rows >= 2 * 132


def test_tiles_are_no_wider_than_the_input() -> None:
    tile = choose_tile(8, 96, DeviceLimits(99 * 1024, 82))
    assert tile == replace(TILES[-1], num_inputs=128)
