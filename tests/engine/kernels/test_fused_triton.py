"""Norms, activations and rotary embedding against the reference, in Triton's interpreter."""

import pytest
import torch

from minivllm_engine.ops.fused.triton import norm
from support.kernel_checks import fused, needs_interpreter

pytestmark = needs_interpreter

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 72, 1200])
def test_norm_and_norm_of_a_sum(size: int, dtype: torch.dtype) -> None:
    fused.check_norms(CPU, dtype, 3, size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 24, 128])
def test_gated_norm(size: int, dtype: torch.dtype) -> None:
    fused.check_gated_norm(CPU, dtype, 3, 5, size)


def test_gated_norm_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several to a program; the last one has none left for some of its rows."""
    monkeypatch.setattr(norm, "_MANY_ROWS", 50)
    fused.check_gated_norm(CPU, torch.float32, 17, 3, 40)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(dtype: torch.dtype) -> None:
    for size in (8, 1100):
        fused.check_activations(CPU, dtype, 3, size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(4, 2, 32, 8), (3, 1, 24, 24), (6, 2, 64, 16)], ids=["quarter", "whole", "group_of_3"]
)
def test_queries_and_keys_are_normed_and_rotated_and_written(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads, head_dim, rotary_dim = shape
    fused.check_rotary(
        CPU,
        dtype,
        17,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cosines_and_sines_of_positions(dtype: torch.dtype) -> None:
    fused.check_angles(CPU, dtype, 64)
    fused.check_angles(CPU, dtype, 24, factor=1.3)
