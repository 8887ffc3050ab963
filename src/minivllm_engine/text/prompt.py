"""The forms in which a prompt may come, read into token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from minivllm_engine.core.errors import RequestError
from minivllm_engine.core.suggest import suggest
from minivllm_engine.text.template_sandbox import compile_template
from minivllm_engine.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]

_BODIES = ("messages", "prompt", "prompt_token_ids")
_SWITCHES = ("enable_thinking", "continue_final_message")
_EXTRAS = {
    "messages": {"tools", "chat_template_kwargs", *_SWITCHES},
    "prompt": set[str](),
    "prompt_token_ids": {"chat"},
}
_RESERVED = frozenset({"tools", "add_generation_prompt", "chat_template", "messages"})


class PromptTooLong(RequestError):
    """A text that has `num_tokens` or more, too many whatever they are; `answered`: a token must follow."""

    default_code = "prompt_too_long"

    def __init__(self, num_tokens: int, limit: int, *, answered: bool = True) -> None:
        more = " + 1" if answered else ""
        super().__init__(f"at least {num_tokens} prompt tokens{more} > max_model_len {limit}")
        self.num_tokens = num_tokens


def read_prompt(
    prompt: Prompt, tokenizer: Tokenizer, max_model_len: int | None = None
) -> tuple[list[int], bool]:
    """Return token ids of a prompt, and whether it is a chat (whose reasoning is told from the answer).

    Args:
        prompt: raw text; token ids; a list of messages; or a mapping with one of `messages` (with
            `tools`, `chat_template_kwargs`, `enable_thinking`, `continue_final_message`), `prompt`, or
            `prompt_token_ids` (with `chat`).
        max_model_len: text that cannot fit is refused before it is encoded, which would take long.

    Raises:
        RequestError: it is none of these, the chat template refuses it, or it cannot fit.
    """
    if is_messages(prompt):
        prompt = {"messages": prompt}
    if isinstance(prompt, str):
        return encode_text(prompt, tokenizer, max_model_len), False
    if not isinstance(prompt, Mapping):
        return check_ids(prompt, tokenizer), False
    body = _body_of(prompt)
    if body == "prompt_token_ids":
        return check_ids(prompt[body], tokenizer), bool(prompt.get("chat", False))
    if body == "messages":
        return encode_text(_render(prompt, tokenizer), tokenizer, max_model_len), True
    if not isinstance(prompt[body], str):
        raise RequestError("prompt: not a string", why=f"got {prompt[body]!r}"[:200])
    return encode_text(prompt[body], tokenizer, max_model_len), False


def is_messages(prompt: object) -> bool:
    """Tell whether this is a conversation: a list of objects with roles."""
    return (
        isinstance(prompt, list | tuple)
        and all(isinstance(one, Mapping) and not one.keys() & set(_BODIES) for one in prompt)
        and any("role" in one for one in prompt)
    )


def _body_of(prompt: Mapping[str, Any]) -> str:
    bodies = [key for key in _BODIES if key in prompt]
    if len(bodies) != 1:
        raise RequestError(
            f"a prompt needs one of {', '.join(_BODIES)}", why=f"got {', '.join(bodies) or 'none'}"
        )
    unknown = sorted(set(map(str, prompt)) - _EXTRAS[bodies[0]] - {bodies[0]})
    if unknown:
        raise RequestError(f"{unknown[0]}: unknown key beside {bodies[0]}")
    return bodies[0]


def _render(prompt: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    given = prompt.get("chat_template_kwargs") or {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise RequestError("chat_template_kwargs: not an object", why=f"got {given!r}"[:200])
    kwargs = dict(given)
    for key in _SWITCHES:
        if prompt.get(key) is None:
            continue
        if kwargs.setdefault(key, prompt[key]) != prompt[key]:
            raise RequestError(f"{key} is given twice")
    goes_on = kwargs.pop("continue_final_message", None) or False
    for key, value in (*kwargs.items(), ("continue_final_message", goes_on)):
        if key in _SWITCHES and not isinstance(value, bool):
            raise RequestError(f"{key} should be true or false", why=f"got {value!r}"[:200])
    reserved = sorted(_RESERVED & kwargs.keys())
    if reserved:
        raise RequestError(f"chat_template_kwargs: {reserved[0]} cannot be set here")
    tools = prompt.get("tools")
    known = compile_template(tokenizer.template_for(tools)).variables
    unread = next((key for key in kwargs if key not in known), None)
    if unread is not None:
        near = suggest(unread, known)
        raise RequestError(
            f"{unread}: the chat template does not read it",
            hint=f"did you mean {near}?" if near else None,
        )
    return tokenizer.render_chat(
        prompt["messages"], tools=tools, continue_final_message=goes_on, **kwargs
    )


def encode_text(text: str, tokenizer: Tokenizer, max_model_len: int | None) -> list[int]:
    """Encode raw text.

    Args:
        max_model_len: text that cannot fit is refused before it is encoded.

    Raises:
        PromptTooLong: text that cannot fit.
        RequestError: it has a token that the model has no embedding for.
    """
    if max_model_len is not None and len(text) > max_model_len:
        least = tokenizer.least_tokens(text)
        if least + 1 > max_model_len:
            raise PromptTooLong(least, max_model_len)
    return _in_range(tokenizer.encode(text), tokenizer)


def check_ids(ids: object, tokenizer: Tokenizer) -> list[int]:
    """Return given token ids.

    Raises:
        RequestError: they are not a list of ids that the model has embeddings for.
    """
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise RequestError("a prompt is text, token ids or an object", why=f"got {ids!r}"[:200])
    if set(map(type, ids)) - {int}:  # in prompts of a thousand tokens a loop over them shows
        wrong = [i for i in ids if not isinstance(i, int) or isinstance(i, bool)]
        if wrong:
            raise RequestError(
                "prompt_token_ids: not all are integers", why=f"got {wrong[0]!r}"[:200]
            )
    return _in_range(list(ids), tokenizer)


def _in_range(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Refuse ids that the model has no embedding for."""
    limit = tokenizer.num_embeddings
    if limit is not None and ids and not (min(ids) >= 0 and max(ids) < limit):
        wrong = next(i for i in ids if not 0 <= i < limit)
        text = tokenizer.token_text(wrong) if tokenizer.is_added(wrong) else ""
        raise RequestError(
            f"prompt token id {wrong} is out of range",
            why=f"the model has ids 0 to {limit - 1}"
            + (f", and this one is {text!r}" if text else ""),
        )
    return ids
