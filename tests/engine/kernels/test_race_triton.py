"""Draws without a sort: the kernels against plain PyTorch."""

import pytest
import torch

from minivllm_engine.ops.sampling import largest_triton, race_triton
from support.kernel_checks import needs_interpreter
from support.kernel_checks.race import check_largest, check_likelihoods, check_race

CPU = torch.device("cpu")


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 300])
def test_tokens_of_all_kinds_are_those_of_the_reference(vocab: int, dtype: torch.dtype) -> None:
    check_race(CPU, dtype, 11, vocab)


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 3000])
def test_likelihoods_are_those_of_the_reference(vocab: int, dtype: torch.dtype) -> None:
    check_likelihoods(CPU, dtype, 12, vocab)


@needs_interpreter
def test_rows_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race_triton, "_BLOCK", 256)
    monkeypatch.setattr(largest_triton, "_BLOCK", 128)
    check_race(CPU, torch.float32, 11, 700)


@needs_interpreter
@pytest.mark.parametrize(("vocab", "most"), [(5, 5), (2500, 20), (5000, 128)])
def test_the_largest_in_their_order_also_where_more_than_fit_are_equal(
    vocab: int, most: int
) -> None:
    check_largest(CPU, torch.bfloat16, 12, vocab, most)
