"""Answers to OpenAI batch lines, in OpenAI's shape."""

import time
from typing import Any

from minivllm_engine.core.outputs import (
    CompletionOutput,
    FinishReason,
    PositionLogprobs,
    RequestOutput,
    TokenLogprob,
)
from minivllm_engine.protocol.lines import BatchLine, Line, RequestLine
from minivllm_engine.protocol.openai_batch import CHAT_URL
from minivllm_engine.protocol.shapes import TokenText, cache_record, prompt_records, token_record

_SERVER_CODES = ("engine_error", "non_finite_logits")


def openai_error(line: Line, batch: BatchLine, error: dict[str, Any]) -> dict[str, Any]:
    """A failure: the status says whose fault it was, the body what it is."""
    status = 500 if error["code"] in _SERVER_CODES else 400
    return _shell(line, batch, status, {"error": error})


def openai_answer(
    line: RequestLine, batch: BatchLine, output: RequestOutput, token_text: TokenText, strip: bool
) -> dict[str, Any]:
    """A chat or text completion. OpenAI has one word for our `length` and `context`."""
    is_chat = batch.url == CHAT_URL
    usage = output.usage
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{line.index}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": batch.model,
        "choices": [_choice(o, is_chat, token_text, strip) for o in output.outputs],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": cache_record(usage, token_text),
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        },
    }
    if output.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_records(output.prompt_logprobs, token_text)
    return _shell(line, batch, 200, body)


def _shell(line: Line, batch: BatchLine, status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"batch_req_{line.index}",
        "custom_id": batch.custom_id if batch.custom_id is not None else line.id,
        "response": {"status_code": status, "request_id": f"req_{line.index}", "body": body},
        "error": None,
    }


def _choice(
    output: CompletionOutput, is_chat: bool, token_text: TokenText, strip: bool
) -> dict[str, Any]:
    reason = output.finish_reason
    finish = "stop" if reason == FinishReason.STOP else "length"
    logprobs = None
    if output.logprobs is not None:
        content = [_openai_position(p, token_text) for p in output.logprobs]
        logprobs = {"content": content}
    choice: dict[str, Any] = {"index": output.index, "finish_reason": finish, "logprobs": logprobs}
    if not is_chat:
        return {**choice, "text": output.text}
    message: dict[str, Any] = {"role": "assistant", "content": output.text}
    if output.reasoning is not None and not strip:
        message["reasoning_content"] = output.reasoning
    return {**choice, "message": message}


def _openai_position(position: PositionLogprobs, token_text: TokenText) -> dict[str, Any]:
    def shape(token: TokenLogprob) -> dict[str, Any]:
        plain = token_record(token, token_text)
        return {"token": plain["token"], "logprob": plain["logprob"], "bytes": None}

    return {
        **shape(position.sampled),
        "top_logprobs": [shape(token) for token in position.top],
    }
