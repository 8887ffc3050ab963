"""A short chunk over fixed buffers: as the reference computes it, and nobody else notices."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import minivllm_engine.runner.model_runner as model_runner
from minivllm_engine import LLM, SamplingParams
from minivllm_engine.core.outputs import RequestOutput
from minivllm_engine.core.request import Request
from minivllm_engine.core.sampling_params import ResolvedSampling
from minivllm_engine.ops.kernel_backend import kernel_operations
from minivllm_engine.runner import graph_prefill as static_prompt
from minivllm_engine.runner.graph_prefill import MAX_TOKENS, GraphPrefill
from minivllm_engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledSequence
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
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the chunks that went through the fixed buffers."""
    lengths: list[int] = []
    load = GraphPrefill.load

    def counted(self: GraphPrefill, batch: Any) -> None:
        lengths.append(batch.sequences[0].length)
        load(self, batch)

    monkeypatch.setattr(GraphPrefill, "load", counted)
    return lengths


# Rows past the end of a chunk are computed from whatever was in memory.
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_short_chunks_are_answered_as_by_the_reference(
    tiny_model, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Fewer rows than there are on a GPU, and a budget of as many: Triton's interpreter takes its time.
    monkeypatch.setattr(static_prompt, "MAX_TOKENS", 16)
    text = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    # Chunks that fill the buffers and that do not, from nothing and with a past.
    prompts = [text[:9], text[:20]]
    answers: list[list[RequestOutput]] = []
    for kernels in (False, True):
        if kernels:
            operations = replace(kernel_operations(), max_few_rows=0)
            monkeypatch.setattr(model_runner, "choose_operations", lambda *_, o=operations: o)
        with LLM(tiny_model, **SMALL) as llm:
            llm._loop.overlap = kernels
            llm._loop.open_runner().pool.fill_(float("nan"))
            answers.append([])
            for prompt in prompts:
                poison_free_memory(llm)
                answers[-1] += llm.generate([prompt], GREEDY)
                llm.check_integrity()
    assert steps == [9, 16, 4]
    for expected, out in zip(*answers, strict=True):
        assert out.error is None
        assert out.outputs[0].token_ids == expected.outputs[0].token_ids
        assert out.usage == expected.usage
        for one, other in zip(out.outputs[0].logprobs, expected.outputs[0].logprobs, strict=True):
            assert one.sampled.logprob == pytest.approx(other.sampled.logprob, abs=2e-4)


def test_only_one_short_chunk_goes_this_way() -> None:
    def batch(*lengths: int, scored: range = range(0)) -> ScheduledBatch:
        request = Request("0", tuple(range(200)), ResolvedSampling(seed=0), 0)
        sequences = tuple(
            ScheduledSequence(request, 0, length, (0,), 0, True, scored=scored)
            for length in lengths
        )
        return ScheduledBatch(sequences, sum(length == 1 for length in lengths))

    assert GraphPrefill.takes(batch(2)) and GraphPrefill.takes(batch(MAX_TOKENS))
    for other in (
        batch(1),
        batch(MAX_TOKENS + 1),
        batch(2, 3),
        batch(1, 2),
        batch(9, scored=range(3)),
    ):
        assert not GraphPrefill.takes(other)
