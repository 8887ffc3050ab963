"""A short chunk over fixed buffers: as the reference computes it, and nobody else notices."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import minivllm_engine.model_runner as model_runner
from minivllm_engine import LLM, SamplingParams
from minivllm_engine.ops.kernel_backend import kernel_operations
from minivllm_engine.request import Request, ResolvedSampling
from minivllm_engine.scheduled_batch import ScheduledBatch, ScheduledSequence
from minivllm_engine.static_prompt import MAX_TOKENS, StaticPrompt
from support.kernel_checks import needs_interpreter
from support.poison import poison_free_memory

pytestmark = needs_interpreter

GREEDY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=3)
SMALL: dict[str, Any] = {
    "engine": {"cpu_memory": "32MiB", "max_num_seqs": 3, "max_model_len": 128},
    "cache": {"block_size": 16},
}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the chunks that went through the fixed buffers."""
    lengths: list[int] = []
    load = StaticPrompt.load

    def counted(self: StaticPrompt, batch: Any) -> None:
        lengths.append(batch.sequences[0].length)
        load(self, batch)

    monkeypatch.setattr(StaticPrompt, "load", counted)
    return lengths


@pytest.fixture
def kernels(tiny_model, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """An engine of kernels, in the interpreter; small products are left to the library, for speed."""
    operations = replace(kernel_operations(), max_few_rows=0)
    monkeypatch.setattr(model_runner, "choose_operations", lambda *_: operations)
    with LLM(tiny_model, **SMALL) as llm:
        llm._loop.overlap = True
        yield llm


def test_short_chunks_are_answered_as_by_the_reference(
    tiny_model, kernels: LLM, steps: list[int]
) -> None:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, 256, (70,), generator=generator).tolist()
    # From nothing, and after what the cache has: 64 tokens; lengths that fill tiles, and that do not.
    prompts = [text[:17], text, text[:64] + text[:3]]
    answers = []
    with LLM(tiny_model, **SMALL) as reference:
        for llm in (reference, kernels):
            llm._loop.open_runner().pool.fill_(float("nan"))
            answers.append([])
            for prompt in prompts:
                poison_free_memory(llm)
                answers[-1] += llm.generate([prompt], GREEDY)
                llm.check_integrity()
    assert steps == [17, MAX_TOKENS, 6, 3]
    for expected, out in zip(*answers, strict=True):
        assert out.error is None
        assert out.outputs[0].token_ids == expected.outputs[0].token_ids
        assert out.usage == expected.usage
        for one, other in zip(out.outputs[0].logprobs, expected.outputs[0].logprobs, strict=True):
            assert one.token.logprob == pytest.approx(other.token.logprob, abs=2e-4)


def test_only_one_short_chunk_goes_this_way() -> None:
    def batch(*lengths: int, scored: range = range(0)) -> ScheduledBatch:
        request = Request("0", tuple(range(200)), ResolvedSampling(seed=0), 0)
        sequences = tuple(
            ScheduledSequence(request, 0, length, (0,), 0, True, scored=scored)
            for length in lengths
        )
        return ScheduledBatch(sequences, sum(length == 1 for length in lengths))

    assert StaticPrompt.takes(batch(2)) and StaticPrompt.takes(batch(MAX_TOKENS))
    for other in (
        batch(1),
        batch(MAX_TOKENS + 1),
        batch(2, 3),
        batch(1, 2),
        batch(9, scored=range(3)),
    ):
        assert not StaticPrompt.takes(other)
