"""OpenAI batch lines: what of them can be run here."""

from dataclasses import dataclass
from typing import Any

from minivllm_engine.protocol.fields import (
    NEUTRAL,
    SAMPLING_KEYS,
    check_other_key,
    read_sampling,
)
from minivllm_engine.protocol.lines import BatchLine, LineKind, LineProblem
from minivllm_engine.protocol.openai_body import known_keys, read_body_prompt

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
_LINE_KEYS = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The runnable part of a batch line."""

    shape: BatchLine
    kind: LineKind
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
    _check_body(body, is_chat=url == CHAT_URL)
    kind, prompt = read_body_prompt(body, is_chat=url == CHAT_URL)
    model = body.get("model")
    shape = BatchLine(custom_id, url, model if isinstance(model, str) else None)
    sampling = read_sampling({k: v for k, v in body.items() if k in SAMPLING_KEYS})
    return BatchRequest(shape, kind, prompt, sampling, body)


def _check_body(body: dict[str, Any], *, is_chat: bool) -> None:
    known = known_keys(is_chat=is_chat)
    for key, value in body.items():
        if key in known or value is None or value in NEUTRAL.get(key, ()):
            continue
        if key in NEUTRAL:
            what = f"body.{key} {value!r} is not supported"
            raise LineProblem("invalid_field", what, key=key)
        check_other_key(key, body)
        raise LineProblem("invalid_field", f"body.{key} is not supported", key=key)
