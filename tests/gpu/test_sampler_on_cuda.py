"""Sampling on the card: the tokens of the CPU, and nobody waits."""

import warnings

import pytest
import torch

from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.runner.logit_edits import SamplingRow
from minivllm_engine.runner.sampler import draw, sample

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PARAMS = [
    {"temperature": 0},
    {"temperature": 1.0, "top_k": 0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 500, "min_p": 0.02},
    {"temperature": 0.9, "top_k": 64, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"temperature": 0, "logit_bias": {3: 50.0}},
]


def rows(count: int) -> list[SamplingRow]:
    return [
        SamplingRow(
            SamplingParams.create(**PARAMS[i % len(PARAMS)]).resolved(seed=i),
            index=0,
            position=i,
            prompt_ids=(1, 2, 3),
            output_ids=(5, 5, 9),
            forbidden_ids=(0,) if i % 2 else (),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 6, 70])
def test_tokens_are_those_of_the_cpu(count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(count, 50_000) * 3).to(dtype)
    assert sample(logits.cuda(), rows(count)) == sample(logits, rows(count))


def test_drawing_does_not_wait_for_the_card() -> None:
    logits = torch.randn(12, 50_000, device="cuda")
    draw(logits, rows(12)).results()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype each time it is switched
        torch.cuda.set_sync_debug_mode("error")
        try:
            drawn = draw(logits, rows(12))
            with pytest.raises(RuntimeError, match="synchronizing"):
                logits.sum().item()  # the mode is on, and would have told
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [one.token_id for one in drawn.results()] == drawn.token_ids.tolist()
