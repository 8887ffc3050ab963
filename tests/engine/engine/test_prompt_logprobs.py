"""Logprobs of prompt tokens: those of transformers, the same numbers every time, within bounded memory."""

import pytest
import torch

from minivllm_engine import LLM, SamplingParams
from minivllm_engine.runner import sampler
from support.transformers_oracle import TransformersOracle

TOLERANCE = 2e-4
SCORE = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=4)
PLAIN = SCORE.model_copy(update={"prompt_logprobs": None})


def ids(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 320, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def oracle(tiny_model) -> TransformersOracle:
    return TransformersOracle(tiny_model)


@pytest.fixture
def llm(tiny_model):
    with LLM(tiny_model, engine={"max_num_seqs": 4}) as llm:
        llm._loop.runner.pool.fill_(float("nan"))
        yield llm
        llm.check_integrity()


def assert_like_transformers(out, oracle) -> None:
    expected = oracle.logits(out.prompt_token_ids).double().log_softmax(-1)
    first, *others = out.prompt_logprobs
    assert first is None
    assert len(others) == len(out.prompt_token_ids) - 1
    for position, (row, entry) in enumerate(zip(expected[:-1], others, strict=True)):
        token_id = out.prompt_token_ids[position + 1]
        assert entry.sampled.token_id == token_id
        assert entry.sampled.logprob == pytest.approx(row[token_id].item(), abs=TOLERANCE)
        assert entry.sampled.rank == int((row > row[token_id]).sum()) + 1
        values = [token.logprob for token in entry.top]
        assert values == pytest.approx(row.topk(4).values.tolist(), abs=TOLERANCE)
        assert [token.rank for token in entry.top] == [1, 2, 3, 4]


@pytest.mark.parametrize("budget", [7, 64, 2048])
def test_h19_prompt_logprobs_are_those_of_transformers(tiny_model, oracle, budget) -> None:
    prompts = [ids(seed, length) for seed, length in enumerate((1, 2, 63, 64, 65, 150))]
    options = {"max_num_seqs": 4, "max_num_batched_tokens": budget}
    with LLM(tiny_model, engine=options) as llm:
        llm._loop.runner.pool.fill_(float("nan"))
        for out in llm.generate(prompts, SCORE):
            assert_like_transformers(out, oracle)
            assert len(out.outputs[0].token_ids) == 3


def test_h19_asked_twice_they_are_the_same_and_the_cache_is_left_alone(llm) -> None:
    prompt = ids(5, 150)
    first = llm.generate([prompt], SCORE)[0]
    assert llm.stats().blocks_cached == 0
    llm.generate([prompt], PLAIN)
    assert llm.generate([prompt], PLAIN)[0].usage.cached_tokens == 128
    again = llm.generate([prompt], SCORE)[0]
    assert again.prompt_logprobs == first.prompt_logprobs
    assert len(again.prompt_logprobs) == 150
    for out in (first, again):
        assert (out.usage.cached_tokens, out.usage.miss_reason) == (0, "disabled")
    assert again.outputs[0].token_ids == llm.generate([prompt], PLAIN)[0].outputs[0].token_ids


def test_h19_neighbours_and_further_outputs_do_not_disturb_them(llm, oracle) -> None:
    prompts = [ids(5, 90), ids(6, 70), ids(5, 90)]
    params = [SCORE.model_copy(update={"n": 3}), PLAIN, PLAIN]
    scored, *others = llm.generate(prompts, params)
    assert_like_transformers(scored, oracle)
    assert [out.prompt_logprobs for out in others] == [None, None]
    assert len({tuple(out.token_ids) for out in scored.outputs}) == 1


def test_h19_a_preempted_request_scores_each_token_once(tiny_model, oracle) -> None:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 32}
    with LLM(tiny_model, engine=options, cache={"block_size": 16, "num_blocks": 16}) as llm:
        prompts = [ids(seed, 100) for seed in range(3)]
        params = SCORE.model_copy(update={"max_tokens": 60})
        outs = llm.generate(prompts, params)
        assert llm.stats().num_preemptions > 0
        for out in outs:
            assert_like_transformers(out, oracle)


def test_h19_all_of_a_prompts_logits_are_never_there_at_once(llm, monkeypatch) -> None:
    prompt = ids(7, 400)
    logits, rows = llm._loop.runner.model.logits, []

    def counted(hidden):
        rows.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(llm._loop.runner.model, "logits", counted)
    whole = llm.generate([prompt], SCORE)[0]
    assert max(rows) == 399
    rows.clear()
    monkeypatch.setattr(sampler, "_GROUP_ELEMENTS", 32 * 320)
    grouped = llm.generate([prompt], SCORE)[0]
    assert max(rows) == 32
    assert sum(rows) == 399 + 3
    for a, b in zip(whole.prompt_logprobs[1:], grouped.prompt_logprobs[1:], strict=True):
        assert a.sampled.logprob == pytest.approx(b.sampled.logprob, abs=1e-5)


def test_dead_logits_of_a_prompt_row_end_the_request(llm, monkeypatch) -> None:
    logits = llm._loop.runner.model.logits

    def broken(hidden):
        rows = logits(hidden)
        if len(rows) > 4:  # those of the prompt, and not those to sample from
            rows[5] = float("nan")
        return rows

    monkeypatch.setattr(llm._loop.runner.model, "logits", broken)
    bad, good = llm.generate([ids(1, 40), ids(2, 40)], [SCORE, PLAIN])
    assert bad.error.code == "non_finite_logits"
    assert "at position 6 " in bad.error.why
    assert good.error is None
    assert llm.stats().state_slots_used == 0
