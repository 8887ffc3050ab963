"""The keys of a request: prompts, sampling, the chat template; and keys that are only similar to one."""

from functools import lru_cache
from typing import Any

from minivllm_engine.core.errors import RequestError
from minivllm_engine.core.sampling_params import OTHER_NAMES, SamplingParams
from minivllm_engine.core.suggest import suggest
from minivllm_engine.protocol.form_fields import FORM_KEYS, read_form
from minivllm_engine.protocol.lines import LineKind, LineProblem
from minivllm_engine.text.messages import plain_tools, read_messages

SAMPLING_KEYS = frozenset(SamplingParams.model_fields) | {
    *("max_completion_tokens", "top_logprobs", *FORM_KEYS)
}
_PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
_SWITCHES = ("enable_thinking", "continue_final_message")
TEMPLATE_KEYS = frozenset({"tools", "chat_template_kwargs", "add_generation_prompt", *_SWITCHES})
OWN_KEYS = frozenset({"id", *_PROMPT_KEYS, "sampling"}) | TEMPLATE_KEYS
_CONTINUATIONS = ("continuations", "continuation_token_ids")
SCORE_KEYS = frozenset({*_CONTINUATIONS, "prefix_token_id"})
# Keys of other tools that say something about a request as a whole, and what to write instead, if
# something does it. None is not supported.
_OTHER_KEYS: dict[str, str | None] = {
    **dict.fromkeys(("system", "system_prompt"), 'a message with the role "system"'),
    **dict.fromkeys(("sampling_params", "generation_config", "extra_body"), "sampling"),
    **dict.fromkeys(("reasoning_effort", "thinking_budget"), "enable_thinking"),
    **dict.fromkeys(("functions", "function_call"), "tools"),
    **dict.fromkeys(
        (
            *("json_schema", "guided_decoding"),
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "tool_choice"),
            *("parallel_tool_calls", "stream", "stream_options", "echo", "suffix", "chat_template"),
            *("add_special_tokens", "multi_modal_data", "mm_processor_kwargs", "modalities"),
        ),
        None,
    ),
}
# Values with which such a key asks for what happens anyway.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True, False),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "modalities": (["text"],),
}
_PLAIN = (
    ("stop: Input should be a valid tuple", "stop: should be a string or a list of strings"),
    ("stop_token_ids: Input should be a valid tuple", "stop_token_ids: should be a list of ids"),
    ("logit_bias: Input should be a valid dictionary", "logit_bias: should be an object"),
    ("Input should be", "should be"),
)
_MOST_PROMPTS = 1024


def check_other_key(key: str, document: dict[str, Any]) -> None:
    """Refuse a key that is not ours if it is another tool's, or a slip for one of ours.

    Raises:
        LineProblem: it is; with our name for it.
    """
    value = document[key]
    if value is None or value in NEUTRAL.get(key, ()):
        return
    if key in _OTHER_KEYS or key in OTHER_NAMES:
        ours = _OTHER_KEYS.get(key) or OTHER_NAMES.get(key)
        hint = f"use {ours}" if ours else None
        raise LineProblem("invalid_field", f"{key} is not supported", key=key, hint=hint)
    near = _similar_key(key)
    if near is not None and near not in document:
        hint = f"did you mean {near}?"
        raise LineProblem("invalid_field", f"unknown key {key!r}", key=key, hint=hint)


@lru_cache(maxsize=1024)
def _similar_key(key: str) -> str | None:
    plain = key.lower().replace("-", "_")
    known = [name for name in OWN_KEYS | SAMPLING_KEYS if abs(len(name) - len(plain)) <= 2]
    return suggest(plain, sorted(known), cutoff=0.85)


def read_prompt(document: dict[str, Any]) -> tuple[LineKind, str | list[Any]]:
    """Return the kind and the content of what is to be answered.

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
        return "prompt", _check_text(value)
    if present[0] == "messages":
        return "messages", check_messages(value)
    return "tokens", _check_ids(value, "prompt_token_ids")


def is_score(document: dict[str, Any]) -> bool:
    """Tell whether a line wants scores of continuations, and no answer."""
    return any(key in document for key in _CONTINUATIONS)


def read_score_prompt(
    document: dict[str, Any],
) -> tuple[LineKind, str | list[Any], dict[str, Any]]:
    """Return what `read_prompt` does, for a prompt that may be empty, and the keys of the score.

    Raises:
        LineProblem: also where the line sets how an answer is sampled, since none is.
    """
    wrong = next((key for key in document if key in SAMPLING_KEYS or key == "sampling"), None)
    if wrong is not None:
        what = f"{wrong} says how an answer is sampled, and a line with continuations has none"
        raise LineProblem("invalid_field", what, key=wrong, hint=f"leave out {wrong}")
    score = {key: document[key] for key in document if key in SCORE_KEYS}
    if document.get("prompt") == "" and not any(document.get(k) for k in _PROMPT_KEYS):
        return "prompt", "", score
    return *read_prompt(document), score


def read_prompts(value: Any) -> tuple[LineKind, str | list[Any]]:
    """Read OpenAI's `prompt` as `read_prompt` does: text, token ids, or an array of either.

    Raises:
        LineProblem: it is something else.
    """
    if not isinstance(value, list) or not value:
        return "prompt", _check_text(value)
    if isinstance(value[0], int):
        return "tokens", _check_ids(value, "prompt")
    if len(value) > _MOST_PROMPTS:
        what = f"{len(value):,} prompts in one line, at most {_MOST_PROMPTS:,} can be"
        raise LineProblem("invalid_field", what, key="prompt")
    for one in value:
        _check_text(one) if isinstance(one, str) else _check_ids(one, "prompt")
    if len(value) > 1:
        return "prompt", value
    return ("prompt", value[0]) if isinstance(value[0], str) else ("tokens", value[0])


def _check_text(value: Any) -> str:
    if not isinstance(value, str):
        raise LineProblem("invalid_field", "prompt should be a string", key="prompt")
    if not value:
        raise LineProblem("empty_prompt", "the prompt is empty", key="prompt")
    return value


def check_messages(value: Any) -> list[Any]:
    """Check chat messages as far as every template needs them.

    Raises:
        LineProblem: they are not what `read_messages` takes.
    """
    try:
        read_messages(value)
    except RequestError as error:
        raise LineProblem(error.code, error.what, key="messages") from None
    assert isinstance(value, list)
    return value


def plain_reason(text: str) -> str:
    """Return a message about a wrong value without the words of the library that found it."""
    text = text.replace("Value error, ", "")
    for theirs, ours in _PLAIN:
        text = text.replace(theirs, ours)
    return text


def read_tools(document: dict[str, Any]) -> list[Any] | None:
    """Read tool descriptions for the chat template. A tool_choice "none" leaves them out.

    Raises:
        LineProblem: they are no list of objects.
    """
    try:
        tools = plain_tools(document.get("tools"))
        return None if document.get("tool_choice") == "none" else tools
    except RequestError as error:
        raise LineProblem(error.code, error.what, key="tools") from None


def read_template_kwargs(document: dict[str, Any]) -> dict[str, Any]:
    """Return arguments to the chat template: `chat_template_kwargs`, and switches with a key of their own.

    Raises:
        LineProblem: one of them has the wrong type, or is given twice.
    """
    kwargs = document.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        what = "chat_template_kwargs should be an object"
        raise LineProblem("invalid_field", what, key="chat_template_kwargs")
    found = dict(kwargs or {})
    for key in _SWITCHES:
        value = document.get(key)
        if value is None:
            continue
        if not isinstance(value, bool):
            raise LineProblem("invalid_field", f"{key} should be true or false", key=key)
        if found.setdefault(key, value) != value:
            raise LineProblem("invalid_field", f"{key} is given twice", key=key)
    if not found.get("continue_final_message"):
        found.pop("continue_final_message", None)
    opens = document.get("add_generation_prompt")
    if opens not in (None, "continue_final_message" not in found):
        what = f"add_generation_prompt {opens!r} is not supported"
        hint = "use continue_final_message" if opens is False else None
        raise LineProblem("invalid_field", what, key="add_generation_prompt", hint=hint)
    return found


def read_sampling(document: dict[str, Any]) -> dict[str, Any]:
    """Return a line's own sampling, flat or inside "sampling".

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
                    ours = OTHER_NAMES.get(key) or suggest(key, SAMPLING_KEYS)
                    hint = f"use {ours}" if ours else None
                    what = f"unknown key sampling.{key}"
                    raise LineProblem("invalid_field", what, key=key, hint=hint)
                continue
            if value is None:
                continue
            name = "max_tokens" if key == "max_completion_tokens" else key
            if name in found:
                raise LineProblem("invalid_field", f"{name} is given twice", key=key)
            found[name] = value
    return read_form(_openai_logprobs(found))


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


def _check_ids(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise LineProblem("invalid_field", f"{key} should be an array of token ids", key=key)
    if not value:
        raise LineProblem("empty_prompt", f"{key} is empty", key=key)
    return value
