"""Bodies of OpenAI's chat and text completions: what of them can be run here, in a file or by a server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minivllm_engine.core.errors import RequestError
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.protocol.fields import (
    NEUTRAL,
    SAMPLING_KEYS,
    TEMPLATE_KEYS,
    check_messages,
    check_other_key,
    plain_reason,
    read_prompts,
    read_sampling,
    read_template_kwargs,
    read_tools,
)
from minivllm_engine.protocol.lines import LineKind, LineProblem

# Bookkeeping, and wishes about the service that no answer here depends on.
WITHOUT_EFFECT = frozenset(
    {
        *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "verbosity"),
        *("prompt_cache_key", "prompt_cache_retention", "prediction"),
    }
)
_SERVED = ("stream", "stream_options", "echo")


def known_keys(*, is_chat: bool) -> frozenset[str]:
    """Return the keys of a body that are honoured, or change no answer."""
    wanted = "messages" if is_chat else "prompt"
    return SAMPLING_KEYS | TEMPLATE_KEYS | WITHOUT_EFFECT | {wanted}


def read_body_prompt(body: Mapping[str, Any], *, is_chat: bool) -> tuple[LineKind, str | list[Any]]:
    """Return the kind and the content of what a body asks to be answered.

    Raises:
        LineProblem: there is none, or it is not what its key says.
    """
    wanted = "messages" if is_chat else "prompt"
    if body.get(wanted) is None:
        raise LineProblem("invalid_field", f"body has no {wanted}", key=wanted)
    return ("messages", check_messages(body[wanted])) if is_chat else read_prompts(body[wanted])


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A completion as a client of a server asked for it.

    Attributes:
        prompts: each as `LLM.add_request` takes it; several where the body has an array of prompts.
        params: as written; None of its fields where nothing was said.
        model: the name that was asked for, or None.
        include_usage, continuous_usage: of a stream: figures at its end, or in every chunk.
        echo: the prompt is part of the answer; `max_tokens` 0 then asks for nothing more.
        prompt_only: `max_tokens` was 0: one token is computed, and cut off.
        ignored: keys that no one here knows.
    """

    is_chat: bool
    prompts: list[dict[str, Any]]
    params: SamplingParams
    model: str | None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    prompt_only: bool = False
    ignored: list[str] = field(default_factory=list)


def read_request(body: Mapping[str, Any], *, is_chat: bool) -> ParsedRequest:
    """Read the body of a request to a server.

    Raises:
        LineProblem: a key is wrong, or asks for something that is not there; `key` names it.
    """
    known = known_keys(is_chat=is_chat)
    ignored = []
    for key, value in body.items():
        if key in known or key in _SERVED or value is None or value in NEUTRAL.get(key, ()):
            continue
        check_other_key(key, dict(body))
        ignored.append(key)
    kind, prompt = read_body_prompt(body, is_chat=is_chat)
    values = read_sampling({key: one for key, one in body.items() if key in SAMPLING_KEYS})
    echo = _flag(body, "echo")
    prompt_only = echo and values.get("max_tokens") == 0
    if prompt_only:
        values["max_tokens"] = 1
    if echo and values.get("logprobs") is not None:
        values["prompt_logprobs"] = values["logprobs"]
    stream, (include_usage, continuous) = _flag(body, "stream"), _stream_options(body)
    if echo and (stream or is_chat):
        raise LineProblem("invalid_field", "echo is there without stream alone", key="echo")
    return ParsedRequest(
        is_chat=is_chat,
        prompts=_prompts(kind, prompt, dict(body)),
        params=_params(values),
        model=body["model"] if isinstance(body.get("model"), str) else None,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous,
        echo=echo,
        prompt_only=prompt_only,
        ignored=ignored,
    )


def _prompts(kind: LineKind, prompt: str | list[Any], body: dict[str, Any]) -> list[dict[str, Any]]:
    if kind == "messages":
        kwargs = read_template_kwargs(body)
        return [{"messages": prompt, "tools": read_tools(body), "chat_template_kwargs": kwargs}]
    if kind == "tokens":
        return [{"prompt_token_ids": prompt}]
    many = [prompt] if isinstance(prompt, str) else prompt
    return [{"prompt" if isinstance(one, str) else "prompt_token_ids": one} for one in many]


def _params(values: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams.create(**values)
    except RequestError as error:
        key = error.what.partition(":")[0]
        raise LineProblem("invalid_field", plain_reason(error.what), key=key) from None


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise LineProblem("invalid_field", f"{key} should be true or false", key=key)
    return bool(value)


def _stream_options(body: Mapping[str, Any]) -> tuple[bool, bool]:
    options = body.get("stream_options")
    if options is None:
        return False, False
    if not isinstance(options, dict):
        raise LineProblem(
            "invalid_field", "stream_options should be an object", key="stream_options"
        )
    names = ("include_usage", "continuous_usage_stats")
    include, continuous = (_flag(options, name) for name in names)
    return include, include and continuous
