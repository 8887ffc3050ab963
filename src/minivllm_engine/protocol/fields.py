"""The keys of an input line: prompts, sampling, and what is only similar to a key."""

from difflib import SequenceMatcher
from functools import lru_cache
from typing import Any

from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.protocol.lines import LineKind, LineProblem

SAMPLING_KEYS = frozenset(SamplingParams.model_fields) | {"max_completion_tokens", "top_logprobs"}
_PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
OWN_KEYS = frozenset({"id", *_PROMPT_KEYS, "sampling", "tools", "chat_template_kwargs"})
_SIMILAR = 0.82
_PLAIN = (
    ("stop: Input should be a valid tuple", "stop: should be a string or a list of strings"),
    ("stop_token_ids: Input should be a valid tuple", "stop_token_ids: should be a list of ids"),
    ("logit_bias: Input should be a valid dictionary", "logit_bias: should be an object"),
    ("Input should be", "should be"),
)


def near_miss(key: str, document: dict[str, Any]) -> str | None:
    """The key of ours that `key` looks like a slip for, unless the line has that one too."""
    return next((known for known in _similar_keys(key) if known not in document), None)


@lru_cache(maxsize=1024)
def _similar_keys(key: str) -> tuple[str, ...]:
    plain = key.lower().replace("-", "_")
    near = [known for known in OWN_KEYS | SAMPLING_KEYS if abs(len(known) - len(plain)) <= 2]
    ratios = {known: SequenceMatcher(None, plain, known).ratio() for known in near}
    return tuple(sorted(known for known in near if ratios[known] > _SIMILAR))


def read_prompt(document: dict[str, Any]) -> tuple[LineKind, str | list[Any]]:
    """The kind and the content of what is to be answered.

    Raises:
        LineProblem: there is none, more than one, or it is not what its key says.
    """
    present = [key for key in _PROMPT_KEYS if document.get(key) is not None]
    if not present:
        raise LineProblem("invalid_field", "no prompt, messages or prompt_token_ids")
    if len(present) > 1:
        raise LineProblem(
            "invalid_field", f"{present[0]} and {present[1]} exclude each other", key=present[1]
        )
    value = document[present[0]]
    if present[0] == "prompt":
        return "prompt", check_text(value)
    if present[0] == "messages":
        return "messages", check_messages(value)
    return "tokens", _check_ids(value)


def check_text(value: Any) -> str:
    """A raw prompt.

    Raises:
        LineProblem: it is empty or no string.
    """
    if not isinstance(value, str):
        raise LineProblem("invalid_field", "prompt should be a string", key="prompt")
    if not value:
        raise LineProblem("empty_prompt", "the prompt is empty", key="prompt")
    return value


def check_messages(value: Any) -> list[Any]:
    """Chat messages, as far as every template needs them.

    Raises:
        LineProblem: they are not a list of objects with a role and a content.
    """

    def wrong(what: str) -> LineProblem:
        return LineProblem("invalid_field", what, key="messages")

    if not isinstance(value, list):
        raise wrong("messages should be an array")
    if not value:
        raise LineProblem("empty_prompt", "messages is empty", key="messages")
    for place, message in enumerate(value):
        if not isinstance(message, dict):
            raise wrong(f"messages[{place}] should be an object")
        if not isinstance(message.get("role"), str):
            raise wrong(f"messages[{place}] has no role")
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise wrong(f"messages[{place}] has no content")
        if content is not None and not isinstance(content, str | list):
            raise wrong(f"messages[{place}].content should be a string")
        for number, part in enumerate(content if isinstance(content, list) else []):
            if not _is_text_part(part):
                raise wrong(
                    f"messages[{place}].content[{number}] should be "
                    '{"type": "text", "text": "..."}; other parts are not supported'
                )
    return value


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def plain_reason(text: str) -> str:
    """A message about a wrong value without the words of the library that found it."""
    text = text.replace("Value error, ", "")
    for theirs, ours in _PLAIN:
        text = text.replace(theirs, ours)
    return text


def check_tools(value: Any) -> list[Any] | None:
    """Tool descriptions for the chat template.

    Raises:
        LineProblem: they are no list of objects.
    """
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise LineProblem("invalid_field", "tools should be an array of objects", key="tools")
    return value or None


def read_sampling(document: dict[str, Any]) -> dict[str, Any]:
    """A line's own sampling, flat or inside "sampling".

    Raises:
        LineProblem: a key that is unknown, or given in both places.
    """
    nested = document.get("sampling")
    if nested is not None and not isinstance(nested, dict):
        raise LineProblem("invalid_field", "sampling should be an object", key="sampling")
    found: dict[str, Any] = {}
    for source in (document, nested or {}):
        for key, value in source.items():
            if key not in SAMPLING_KEYS:
                if source is nested:
                    near = near_miss(key, nested)
                    hint = f"did you mean {near}?" if near in SAMPLING_KEYS else None
                    raise LineProblem(
                        "invalid_field", f"unknown key sampling.{key}", key=key, hint=hint
                    )
                continue
            if value is None:
                continue
            name = "max_tokens" if key == "max_completion_tokens" else key
            if name in found:
                raise LineProblem("invalid_field", f"{name} is given twice", key=key)
            found[name] = value
    return _openai_logprobs(found)


def _openai_logprobs(found: dict[str, Any]) -> dict[str, Any]:
    # OpenAI's chat form: logprobs is true or false, top_logprobs the count.
    top = found.pop("top_logprobs", None)
    flag = found.get("logprobs")
    if flag is True:
        found["logprobs"] = top or 0
    elif flag is False:
        del found["logprobs"]
    elif top is not None:
        found.setdefault("logprobs", top)
    return found


def _check_ids(value: Any) -> list[Any]:
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise LineProblem(
            "invalid_field",
            "prompt_token_ids should be an array of token ids",
            key="prompt_token_ids",
        )
    if not value:
        raise LineProblem("empty_prompt", "prompt_token_ids is empty", key="prompt_token_ids")
    return value
