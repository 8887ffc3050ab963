"""Chunks over fixed buffers, by the kernels: as the reference computes them, and nobody else notices."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import minivllm_engine.runner.model_runner as model_runner
from minivllm_engine import LLM, SamplingParams
from minivllm_engine.core.outputs import RequestOutput
from minivllm_engine.ops import kernel_backend
from minivllm_engine.ops.prompt_buffers import Bucket
from minivllm_engine.runner.graph_prefill import GraphPrefill
from support import fla_stand_in
from support.kernel_checks import needs_interpreter
from support.poison import poison_free_memory

pytestmark = needs_interpreter

GREEDY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=3)
SMALL: dict[str, Any] = {
    "engine": {
        "cpu_memory": "32MiB",
        "max_num_seqs": 3,
        "max_model_len": 128,
        "max_num_batched_tokens": 16,
    },
    "cache": {"block_size": 16},
}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], Bucket]]:
    """Lengths of the chunks that went through the fixed buffers, and their buckets."""
    seen: list[tuple[list[int], Bucket]] = []
    load = GraphPrefill.load

    def counted(self: GraphPrefill, sequences: Any, bucket: Bucket) -> int:
        seen.append(([sequence.length for sequence in sequences], bucket))
        return load(self, sequences, bucket)

    monkeypatch.setattr(GraphPrefill, "load", counted)
    return seen


# Rows past the end of a chunk are computed from whatever was in memory.
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("rule", ["recurrent", "chunked"])
def test_chunks_are_answered_as_by_the_reference(
    tiny_model, steps: list[Any], monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    # Fewer rows than there are on a GPU, and a budget of as many: Triton's interpreter takes its time.
    monkeypatch.setattr(model_runner, "prompt_buckets", lambda *_: ((16, 1), (16, 3)))
    monkeypatch.setattr(kernel_backend, "_SHORT", 64 if rule == "recurrent" else 0)
    fla_stand_in.install(monkeypatch)
    text = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    # Chunks that fill the buffers and that do not, from nothing and with a past, alone and beside others.
    batches = [[text[:9]], [text[:20]] if rule == "recurrent" else [text[3:8], text[30:], text[:2]]]
    answers: list[list[RequestOutput]] = []
    for kernels in (False, True):
        if kernels:
            operations = replace(kernel_backend.kernel_operations(), max_few_rows=0)
            monkeypatch.setattr(model_runner, "choose_operations", lambda *_, o=operations: o)
        with LLM(tiny_model, **SMALL) as llm:
            llm._loop.overlap = kernels
            llm._loop.open_runner().pool.fill_(float("nan"))
            answers.append([])
            for prompts in batches:
                poison_free_memory(llm)
                answers[-1] += llm.generate(prompts, GREEDY)
                llm.check_integrity()
    alone, several = (16, 1), (16, 3)
    assert steps[0] == ([9], alone)
    if rule == "recurrent":
        assert steps[1:] == [([16], alone), ([4], alone)]
    else:
        assert several in {bucket for _, bucket in steps[1:]}
    for expected, out in zip(*answers, strict=True):
        assert out.error is None
        assert out.outputs[0].token_ids == expected.outputs[0].token_ids
        assert out.usage == expected.usage
        for one, other in zip(out.outputs[0].logprobs, expected.outputs[0].logprobs, strict=True):
            assert one.sampled.logprob == pytest.approx(other.sampled.logprob, abs=2e-4)
