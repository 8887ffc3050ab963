"""Answers in a form: the same in any company, after the reasoning, and an end of their own where it fails."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from minivllm_engine import LLM, SamplingParams
from minivllm_engine.core.errors import EngineError
from minivllm_engine.core.outputs import FinishReason, RequestOutput
from support.request_kinds import engine, ids

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 6}},
    "required": ["n", "s"],
    "additionalProperties": False,
}


def params(form: dict[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(
        **({"temperature": 1.0, "seed": 1, "max_tokens": 90} | more), structured=form
    )


KINDS: list[tuple[Any, SamplingParams]] = [
    (ids(1, 40), params({"json_schema": SCHEMA}, seed=5)),
    (ids(1, 40), params({"json_schema": SCHEMA}, temperature=0)),
    (ids(2, 60), params({"regex": "[a-d]{5,9}z"}, n=3)),
    (ids(3, 33), params({"choice": ["red", "green"]}, logprobs=1)),
    (ids(4, 20), params({"json_object": True}, repetition_penalty=1.2, max_tokens=30)),
    (ids(5, 20), params({"grammar": 'start: ("ab" | "cd")~4'}, logit_bias={97: 3.0}, top_k=5)),
    (ids(6, 50), SamplingParams(temperature=0, max_tokens=20)),
]


def told(out: RequestOutput) -> list[Any]:
    assert out.error is None
    return [(o.token_ids, o.text, o.finish_reason) for o in out.outputs]


def run(llm: LLM, requests: list[tuple[Any, SamplingParams]]) -> list[RequestOutput]:
    names = [llm.add_request(prompt, one) for prompt, one in requests]
    found = {}
    while llm.has_unfinished:
        found |= {out.request_id: out for out in llm.step() if out.finished}
        llm.check_integrity()
    return [found[name] for name in names]


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> list[RequestOutput]:
    with engine(tiny_model, overlap=False) as llm:
        return [run(llm, [kind])[0] for kind in KINDS]


def test_answers_have_their_form(alone: list[RequestOutput]) -> None:
    for out in alone[:2]:
        if out.finish_reason == FinishReason.STOP:
            jsonschema.validate(json.loads(out.text), SCHEMA)
    assert [o.finish_reason for o in alone[2].outputs] == [FinishReason.STOP] * 3
    for output in alone[2].outputs:
        assert output.text[-1] == "z" and set(output.text[:-1]) <= set("abcd")
    assert alone[3].text in ("red", "green") and alone[3].finish_reason == FinishReason.STOP
    assert len(alone[5].text) == 8 and set(alone[5].text) <= set("abcd")
    assert alone[5].finish_reason == FinishReason.STOP


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_are_the_same_in_a_batch_and_launched_ahead(
    tiny_model: Path, alone: list[RequestOutput], overlap: bool
) -> None:
    with engine(tiny_model, overlap=overlap) as llm:
        assert [told(out) for out in run(llm, KINDS)] == [told(out) for out in alone]
        # Once more, from the cache.
        assert [told(out) for out in run(llm, KINDS)] == [told(out) for out in alone]


def test_answers_are_the_same_after_a_preemption(
    tiny_model: Path, alone: list[RequestOutput]
) -> None:
    with engine(tiny_model, num_blocks=9) as llm:
        assert [told(out) for out in run(llm, KINDS)] == [told(out) for out in alone]
        assert llm.stats().num_preemptions


def test_a_step_that_fails_moves_no_grammar(tiny_model: Path, alone: list[RequestOutput]) -> None:
    with engine(tiny_model) as llm:
        runner, calls = llm._loop.open_runner(), [0]
        real = runner.run

        def failing(*args: Any) -> Any:
            calls[0] += 1
            if calls[0] == 4:
                raise RuntimeError("a step that fails")
            return real(*args)

        runner.run = failing  # type: ignore[method-assign]
        assert [told(out) for out in run(llm, KINDS)] == [told(out) for out in alone]
        assert calls[0] > 4


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def test_the_form_begins_after_the_reasoning(tiny_model: Path) -> None:
    with engine(tiny_model) as llm:
        close = llm.tokenizer.think_ids
        assert close is not None
        # Biased so that a random model ends its reasoning.
        one = params({"choice": ["yes", "no"]}, logit_bias={close[1]: 3.0}, max_tokens=400)
        (thinking,) = run(llm, [(chat("Well?", enable_thinking=True), one)])
        assert thinking.usage.reasoning_tokens and thinking.reasoning
        assert thinking.text in ("yes", "no") and thinking.finish_reason == FinishReason.STOP
        (cut,) = run(
            llm, [(chat("Well?", enable_thinking=True), params({"choice": ["a"]}, max_tokens=4))]
        )
        assert (cut.text, cut.finish_reason) == ("", FinishReason.LENGTH)
        (plain,) = run(llm, [(chat("Well?", enable_thinking=False), one)])
        assert plain.text in ("yes", "no") and plain.reasoning is None


def test_no_end_id_ends_an_answer_before_it_has_begun(tiny_model: Path) -> None:
    with engine(tiny_model) as llm:
        (end,) = llm.stop_token_ids
        biased = params({"choice": ["yes", "no"]}, logit_bias={end: 100}, max_tokens=20)
        (thinking,) = run(llm, [(chat("Well?", enable_thinking=True), biased)])
        assert thinking.finish_reason == FinishReason.LENGTH
        (plain,) = run(llm, [(chat("Well?", enable_thinking=False), biased)])
        assert plain.text in ("yes", "no")


def test_an_end_id_ends_an_answer_that_is_whole(tiny_model: Path) -> None:
    with engine(tiny_model) as llm:
        (end,) = llm.stop_token_ids
        one = params({"regex": "[a-z]{3,40}"}, logit_bias={end: 100})
        (out,) = run(llm, [(ids(1, 20), one)])
        assert len(out.text) == 3 and out.outputs[0].token_ids[-1] == end
        assert out.finish_reason == FinishReason.STOP


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_what_would_forbid_the_end_is_refused(tiny_model: Path, more: dict[str, Any]) -> None:
    with engine(tiny_model) as llm:
        (out,) = llm.generate([ids(1, 5)], params({"choice": ["a"]}, **more))
        assert out.error is not None and next(iter(more)) in str(out.error)


def test_bad_forms_cost_their_request_alone(tiny_model: Path, alone: list[RequestOutput]) -> None:
    bad = params({"json_schema": {"not": {}}})
    with engine(tiny_model) as llm:
        prompts = [KINDS[3][0], ids(1, 5)]
        good, refused = llm.generate(prompts, [KINDS[3][1], bad])
        assert told(good) == told(alone[3])
        assert refused.error is not None and refused.error.code == "unsupported_schema"


def test_a_grammar_that_fails_ends_its_request_alone(
    tiny_model: Path, alone: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    from minivllm_engine.structured import matcher

    real, calls = matcher.Matcher.fill, [0]

    def failing(self: matcher.Matcher, address: int) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise EngineError("the grammar of the answer failed", code="grammar_failed")
        real(self, address)

    monkeypatch.setattr(matcher.Matcher, "fill", failing)
    with engine(tiny_model) as llm:
        out, free = run(llm, [KINDS[0], KINDS[6]])
        assert out.error is not None and out.error.code == "grammar_failed"
        assert out.finish_reason == FinishReason.ERROR
        assert told(free) == told(alone[6])
