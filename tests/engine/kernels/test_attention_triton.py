"""The kernels of paged attention against the reference, in Triton's interpreter."""

import pytest
import torch

from minivllm_engine.ops.attention.reference import KVShape
from support.kernel_checks import needs_interpreter
from support.kernel_checks.attention import check, check_padding

pytestmark = needs_interpreter

CPU = torch.device("cpu")
FP32 = torch.float32
MIXED = [(0, 1), (15, 1), (16, 1), (200, 1), (0, 65), (7, 3), (64, 64), (0, 1), (130, 63)]
# (block size, heads, key/value heads, head size)
SHAPES = {
    "mha_of_64": KVShape(16, 2, 2, 64),
    "group_of_2_of_128": KVShape(32, 4, 2, 128),
    "group_of_3_of_64": KVShape(48, 3, 1, 64),
    "group_of_4_of_256": KVShape(64, 4, 1, 256),
    "odd_head_size": KVShape(16, 2, 1, 24),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_decodes_prompts_and_chunks_in_one_batch(shape: KVShape) -> None:
    check(CPU, FP32, shape, MIXED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_half_precision_tiles(dtype: torch.dtype, head_dim: int) -> None:
    check(CPU, dtype, KVShape(16, 4, 2, head_dim), [(150, 1), (0, 65), (70, 40)])


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("splits", [1, 2, 4, 16])
def test_decodes_split_among_programs(splits: int, block_size: int) -> None:
    """With more programs than some of the contexts have keys for: each takes 128 at least."""
    spans = [(0, 1), (127, 1), (128, 1), (129, 1), (700, 1), (511, 1)]
    check(CPU, FP32, KVShape(block_size, 3, 1, 64), spans, splits)


def test_split_decodes_in_half_precision() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        check(CPU, dtype, KVShape(16, 4, 1, 64), [(300, 1), (40, 1)], 4)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NaN that padding lanes see
def test_d6_padding_lanes_on_the_sink_change_nothing() -> None:
    check_padding(CPU, FP32, KVShape(16, 3, 1, 64))
