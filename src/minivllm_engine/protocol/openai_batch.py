"""OpenAI batch lines: what of them can be run here."""

from dataclasses import dataclass
from typing import Any

from minivllm_engine.protocol.fields import (
    SAMPLING_KEYS,
    check_messages,
    check_text,
    near_miss,
    read_sampling,
)
from minivllm_engine.protocol.lines import BatchLine, LineProblem

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
_LINE_KEYS = frozenset({"custom_id", "method", "url", "body"})
# Of a body: what is used, and what is bookkeeping and does not change an answer.
_USED = frozenset({"messages", "prompt", "tools", "chat_template_kwargs"})
_BOOKKEEPING = frozenset(
    {"model", "user", "metadata", "store", "service_tier", "safety_identifier"}
)
# Keys that are fine as long as they ask for what happens anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False, None),
    "stream_options": (None,),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
    "parallel_tool_calls": (None, True, False),
    "echo": (None, False),
    "best_of": (None, 1),
    "suffix": (None, ""),
}


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The runnable part of a batch line."""

    shape: BatchLine
    is_chat: bool
    prompt: str | list[Any]
    sampling: dict[str, Any]
    body: dict[str, Any]


def read_batch_line(document: dict[str, Any]) -> BatchRequest:
    """Check a batch line and take it apart.

    Raises:
        LineProblem: a part is missing, wrong, or asks for something that is not there.
    """
    custom_id, url, body = (document.get(key) for key in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise LineProblem("invalid_field", "custom_id should be a string", key="custom_id")
    for key in document:
        if key not in _LINE_KEYS:
            raise LineProblem("invalid_field", f"unknown key {key!r} in a batch line", key=key)
    if document.get("method", "POST") != "POST":
        raise LineProblem("invalid_field", "method should be POST", key="method")
    if url not in (CHAT_URL, COMPLETIONS_URL):
        raise LineProblem(
            "url_mismatch", f"url {url!r} is not served here", key="url", hint=f"use {CHAT_URL}"
        )
    if not isinstance(body, dict):
        raise LineProblem("invalid_field", "body should be an object", key="body")
    _check_body(body)
    is_chat = url == CHAT_URL
    wanted = "messages" if is_chat else "prompt"
    if body.get(wanted) is None:
        raise LineProblem("invalid_field", f"body has no {wanted}", key="body")
    prompt: str | list[Any] = (
        check_messages(body["messages"]) if is_chat else check_text(body["prompt"])
    )
    model = body.get("model")
    shape = BatchLine(custom_id, url, model if isinstance(model, str) else None)
    sampling = read_sampling({k: v for k, v in body.items() if k in SAMPLING_KEYS})
    return BatchRequest(shape, is_chat, prompt, sampling, body)


def _check_body(body: dict[str, Any]) -> None:
    for key, value in body.items():
        if key in SAMPLING_KEYS or key in _USED or key in _BOOKKEEPING:
            continue
        if key in _NEUTRAL:
            if value not in _NEUTRAL[key]:
                raise LineProblem(
                    "invalid_field", f"body.{key} {value!r} is not supported", key=key
                )
            continue
        near = near_miss(key, body)
        hint = f"did you mean {near}?" if near else None
        raise LineProblem("invalid_field", f"body.{key} is not supported", key=key, hint=hint)
