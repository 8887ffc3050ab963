"""The argmax: the reference against the sampler, and the kernels against the reference."""

import pytest
import torch

from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.ops.sampling import reference, triton
from minivllm_engine.runner.logit_edits import SamplingRow
from minivllm_engine.runner.sampler import draw
from support.kernel_checks import needs_interpreter
from support.kernel_checks.sampling import awkward_rows, check_greedy

CPU = torch.device("cpu")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@dtypes
@pytest.mark.parametrize("vocab", [1, 2, 300])
def test_the_reference_is_what_the_sampler_does(vocab: int, dtype: torch.dtype) -> None:
    logits = awkward_rows(33, vocab, dtype)
    params = SamplingParams.create(temperature=0).resolved(seed=0)
    drawn = draw(logits, [SamplingRow(params, 0, 0, (), ())] * len(logits))
    token_ids, alive = reference.greedy(logits)
    assert token_ids.tolist() == drawn.token_ids.tolist()
    assert alive.tolist() == drawn.alive.tolist()
    assert alive.any() and not alive.all()


@needs_interpreter
@dtypes
@pytest.mark.parametrize("vocab", [1, 2, 1024, 1025, 3000])
def test_the_likeliest_token_of_rows_of_all_kinds(vocab: int, dtype: torch.dtype) -> None:
    check_greedy(CPU, dtype, 12, vocab)


@needs_interpreter
@pytest.mark.parametrize("num_rows", [1, 11])
def test_programs_with_several_blocks_and_more_parts_than_are_combined_at_once(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "_BLOCK", 16)
    monkeypatch.setattr(triton, "_PROGRAMS", 40)
    monkeypatch.setattr(triton, "_PARTS", 4)
    assert triton.blocks_of_program(num_rows, 500) == (1 if num_rows == 1 else 8)
    check_greedy(CPU, torch.float32, num_rows, 500)


@needs_interpreter
def test_no_rows() -> None:
    token_ids, alive = triton.greedy(torch.zeros(0, 10))
    assert token_ids.shape == alive.shape == (0,)


def test_one_row_fills_a_large_card_and_many_are_not_cut_small() -> None:
    vocab = 248_320
    assert triton.blocks_of_program(1, vocab) == 1
    blocks = triton.blocks_of_program(256, vocab)
    assert 8 <= blocks <= 16
