"""The forms in which a prompt may come, read into token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from minivllm_engine.core.errors import RequestError
from minivllm_engine.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]

_BODIES = ("messages", "prompt", "prompt_token_ids")
_EXTRAS = {
    "messages": {"tools", "chat_template_kwargs"},
    "prompt": set[str](),
    "prompt_token_ids": {"chat"},
}


def read_prompt(prompt: Prompt, tokenizer: Tokenizer) -> tuple[list[int], bool]:
    """Token ids of a prompt, and whether it is a chat (whose reasoning is told from the answer).

    Args:
        prompt: raw text, token ids, or a mapping with one of `messages` (with `tools` and
            `chat_template_kwargs`), `prompt`, or `prompt_token_ids` (with `chat`).

    Raises:
        RequestError: it is none of these, or the chat template refuses it.
    """
    if isinstance(prompt, str):
        return tokenizer.encode(prompt), False
    if isinstance(prompt, Mapping):
        return _read_mapping(prompt, tokenizer)
    return _check_ids(prompt), False


def _read_mapping(prompt: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[list[int], bool]:
    bodies = [key for key in _BODIES if key in prompt]
    if len(bodies) != 1:
        raise RequestError(
            f"a prompt needs one of {', '.join(_BODIES)}", why=f"got {', '.join(bodies) or 'none'}"
        )
    body = bodies[0]
    unknown = sorted(set(map(str, prompt)) - _EXTRAS[body] - {body})
    if unknown:
        raise RequestError(f"{unknown[0]}: unknown key beside {body}")
    if body == "prompt_token_ids":
        return _check_ids(prompt[body]), bool(prompt.get("chat", False))
    if body == "prompt":
        if not isinstance(prompt[body], str):
            raise RequestError("prompt: not a string", why=f"got {prompt[body]!r}"[:200])
        return tokenizer.encode(prompt[body]), False
    messages = prompt[body]
    if not isinstance(messages, list | tuple) or not all(isinstance(m, Mapping) for m in messages):
        raise RequestError("messages: not a list of objects", why=f"got {messages!r}"[:200])
    if not messages:
        raise RequestError("messages: the list is empty", code="empty_prompt")
    kwargs = prompt.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise RequestError("chat_template_kwargs: not an object", why=f"got {kwargs!r}"[:200])
    reserved = sorted(set(kwargs) & {"tools", "add_generation_prompt", "chat_template", "messages"})
    if reserved:
        raise RequestError(f"chat_template_kwargs: {reserved[0]} cannot be set here")
    return tokenizer.encode_chat(messages, tools=prompt.get("tools"), **kwargs), True


def _check_ids(ids: object) -> list[int]:
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise RequestError("a prompt is text, token ids or an object", why=f"got {ids!r}"[:200])
    wrong = next((i for i in ids if not isinstance(i, int) or isinstance(i, bool)), None)
    if wrong is not None or None in ids:
        raise RequestError("prompt_token_ids: not all are integers", why=f"got {wrong!r}"[:200])
    return list(ids)
