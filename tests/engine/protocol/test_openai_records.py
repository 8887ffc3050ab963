"""OpenAI's shape of an answer: logprobs from which the text can be rebuilt, several prompts in one line."""

from typing import Any

from minivllm_engine.core.outputs import (
    CompletionOutput,
    FinishReason,
    PositionLogprobs,
    RequestOutput,
    Timing,
    TokenLogprob,
    Usage,
)
from minivllm_engine.core.sampling_params import ResolvedSampling, SamplingParams
from minivllm_engine.protocol.lines import BatchLine, RequestLine
from minivllm_engine.protocol.openai_records import join_outputs
from minivllm_engine.protocol.records import ok_record
from support.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
TEXT = "né🙂!"


def answer(text: str, index: int = 0) -> RequestOutput:
    ids = [*TOKENIZER.encode(text), TOKENIZER.eos_ids[0]]
    steps = [
        PositionLogprobs(
            TokenLogprob(i, -0.5, 2), (TokenLogprob(65, -0.25, 1), TokenLogprob(i, -0.5, 2))
        )
        for i in ids
    ]
    output = CompletionOutput(
        index, text, token_ids=ids, logprobs=steps, finish_reason=FinishReason.STOP
    )
    usage = Usage(prompt_tokens=3, completion_tokens=len(ids), cached_tokens=1, kv_matched=2)
    return RequestOutput("r", [1, 2, 3], [output], usage, Timing(), ResolvedSampling(seed=0))


def body(output: RequestOutput, url: str) -> dict[str, Any]:
    line = RequestLine(1, 0, "a", "prompt", "x", SamplingParams(), batch=BatchLine("a", url, "m"))
    record = ok_record(line, output, params=ResolvedSampling(seed=0), tokenizer=TOKENIZER)
    found: dict[str, Any] = record["response"]["body"]
    return found


def test_c3_completions_have_their_own_form() -> None:
    choice = body(answer(TEXT), "/v1/completions")["choices"][0]
    logprobs, count = choice["logprobs"], len(TEXT.encode()) + 1
    assert logprobs.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert all(len(column) == count for column in logprobs.values())
    assert logprobs["tokens"][0] == "n" and logprobs["tokens"][-1] == "<|im_end|>"
    assert logprobs["token_logprobs"] == [-0.5] * count
    assert logprobs["top_logprobs"][0] == {"A": -0.25, "n": -0.5}
    # n, two bytes of é, four of the smiley, !, and the end.
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3, 4]
    assert choice["text"][logprobs["text_offset"][-2] :] == "!"


def test_c3_a_chats_bytes_rebuild_the_text() -> None:
    logprobs = body(answer(TEXT), "/v1/chat/completions")["choices"][0]["logprobs"]
    assert logprobs.keys() == {"content", "refusal"}
    whole = b"".join(bytes(one["bytes"]) for one in logprobs["content"][:-1])
    assert whole.decode() == TEXT
    assert logprobs["content"][0]["top_logprobs"][0] == {
        "token": "A",
        "logprob": -0.25,
        "bytes": [65],
    }


def test_c8_answers_to_several_prompts_are_choices_of_one() -> None:
    whole = join_outputs([answer("a"), answer("bc")])
    found = body(whole, "/v1/completions")
    assert [(c["index"], c["text"]) for c in found["choices"]] == [(0, "a"), (1, "bc")]
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 5)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2
    assert usage["prompt_tokens_details"]["kv_matched"] == 4
