"""Answers to OpenAI batch lines, in OpenAI's shape."""

import codecs
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minivllm_engine.core.outputs import (
    CompletionOutput,
    FinishReason,
    PositionLogprobs,
    RequestOutput,
    TokenLogprob,
    Usage,
)
from minivllm_engine.protocol.lines import BatchLine, Line, RequestLine
from minivllm_engine.protocol.openai_batch import CHAT_URL
from minivllm_engine.protocol.shapes import cache_record, prompt_records, rounded

if TYPE_CHECKING:
    from minivllm_engine.text.tokenizer import Tokenizer

_SERVER_CODES = ("engine_error", "non_finite_logits", "grammar_failed")


def openai_error(line: Line, batch: BatchLine, error: dict[str, Any]) -> dict[str, Any]:
    """Return a failure: the status says whose fault it was, the body what it is."""
    status = 500 if error["code"] in _SERVER_CODES else 400
    return _shell(line, batch, status, {"error": error})


def openai_answer(
    line: RequestLine, batch: BatchLine, output: RequestOutput, tokenizer: "Tokenizer", strip: bool
) -> dict[str, Any]:
    """Return the answer to a batch line."""
    is_chat = batch.url == CHAT_URL
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{line.index}",
        "model": batch.model,
        **completion(output, tokenizer, is_chat=is_chat, strip=strip),
    }
    if output.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_records(output.prompt_logprobs, tokenizer)
    return _shell(line, batch, 200, body)


def completion(
    output: RequestOutput, tokenizer: "Tokenizer", *, is_chat: bool, strip: bool = False
) -> dict[str, Any]:
    """Return a chat or text completion but for its id and model.

    Args:
        strip: leave the reasoning out.
    """
    return {
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "choices": [_choice(one, is_chat, tokenizer, strip) for one in output.outputs],
        "usage": openai_usage(output.usage, tokenizer),
    }


def openai_usage(usage: Usage, tokenizer: "Tokenizer") -> dict[str, Any]:
    """Return `usage` as OpenAI has it, and beside `cached_tokens` why it was not more."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": cache_record(usage, tokenizer),
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def openai_finish(reason: FinishReason | None) -> str | None:
    """Return OpenAI's word, which has one for our `length` and `context`; None while it goes on."""
    return None if reason is None else "stop" if reason == FinishReason.STOP else "length"


def join_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Return one output of several prompts, as a line with an array of prompts is answered with."""
    if len(outputs) == 1:
        return outputs[0]
    choices = [choice for output in outputs for choice in output.outputs]
    total = Usage(prompt_tokens=0)
    for output in outputs:
        for name in ("prompt_tokens", "completion_tokens", "reasoning_tokens", "cached_tokens"):
            setattr(total, name, getattr(total, name) + getattr(output.usage, name))
        total.kv_matched += output.usage.kv_matched
    return replace(
        outputs[0],
        outputs=[replace(choice, index=index) for index, choice in enumerate(choices)],
        usage=total,
        error=next((output.error for output in outputs if output.error is not None), None),
    )


def _shell(line: Line, batch: BatchLine, status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"batch_req_{line.index}",
        "custom_id": batch.custom_id if batch.custom_id is not None else line.id,
        "response": {"status_code": status, "request_id": f"req_{line.index}", "body": body},
        "error": None,
    }


def _choice(
    output: CompletionOutput, is_chat: bool, tokenizer: "Tokenizer", strip: bool
) -> dict[str, Any]:
    finish, logprobs = openai_finish(output.finish_reason), None
    if output.logprobs is not None:
        write = chat_logprobs if is_chat else completion_logprobs
        logprobs = write(output.logprobs, tokenizer)
    choice: dict[str, Any] = {"index": output.index, "finish_reason": finish, "logprobs": logprobs}
    if not is_chat:
        return {**choice, "text": output.text}
    message: dict[str, Any] = {"role": "assistant", "content": output.text}
    if output.reasoning is not None and not strip:
        message["reasoning_content"] = output.reasoning
    return {**choice, "message": message}


def chat_logprobs(positions: Sequence[PositionLogprobs], tokenizer: "Tokenizer") -> dict[str, Any]:
    """Return logprobs in the form of chat completions."""

    def shape(token: TokenLogprob) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token.token_id),
            "logprob": rounded(token),
            "bytes": list(tokenizer.token_bytes(token.token_id)),
        }

    content = [
        {**shape(one.sampled), "top_logprobs": [shape(token) for token in one.top]}
        for one in positions
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    positions: Sequence[PositionLogprobs], tokenizer: "Tokenizer", start: int = 0
) -> dict[str, Any]:
    """Return logprobs in the form of text completions.

    Offsets count characters of the answer's text from `start`; a token within one stands where that begins.
    """
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, length = [], start
    for one in positions:
        offsets.append(length)
        token_id = one.sampled.token_id
        if not tokenizer.is_special(token_id):
            length += len(utf8.decode(tokenizer.token_bytes(token_id)))
    top = []
    for one in positions:
        # Best first, so that of tokens with the same text (parts of characters) the best one stays.
        found: dict[str, float] = {}
        for token in (*one.top, one.sampled):
            found.setdefault(tokenizer.token_text(token.token_id), rounded(token))
        top.append(found)
    return {
        "tokens": [tokenizer.token_text(one.sampled.token_id) for one in positions],
        "token_logprobs": [rounded(one.sampled) for one in positions],
        "top_logprobs": top,
        "text_offset": offsets,
    }
