"""The kernels of the causal convolution against the reference, in Triton's interpreter."""

import pytest
import torch

from support.kernel_checks import needs_interpreter
from support.kernel_checks.causal_conv import check_heads, check_prefill, check_steps

pytestmark = needs_interpreter

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("conv_width", [2, 3, 4, 6])
def test_steps_move_the_history_on_in_place(conv_width: int) -> None:
    check_steps(CPU, torch.float32, 270, conv_width)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_round_once(dtype: torch.dtype) -> None:
    check_steps(CPU, dtype, 24, 4)


@pytest.mark.parametrize("conv_width", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prompts_and_chunks_shorter_and_longer_than_taps_and_tiles(
    dtype: torch.dtype, conv_width: int
) -> None:
    spans = [(0, 1), (5, 1), (0, 2), (1, 2), (2, 3), (0, 3), (9, 63), (0, 64), (3, 65), (0, 16)]
    check_prefill(CPU, dtype, 140, conv_width, spans)


def test_a_new_history_may_consist_of_the_old_one() -> None:
    """A chunk shorter than the history, which so has to be moved within itself."""
    for length in (1, 2, 3, 4):
        check_prefill(CPU, torch.float32, 9, 6, [(4, length), (0, length)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "heads", [(3, 16, 5, 8), (1, 256, 1, 12), (2, 64, 2, 64)], ids=["16", "256", "64"]
)
def test_queries_keys_and_values_lie_apart_and_normed(
    dtype: torch.dtype, heads: tuple[int, int, int, int]
) -> None:
    """Heads smaller than a tile, larger than one, and a tile with heads of two kinds."""
    check_heads(CPU, dtype, heads)
