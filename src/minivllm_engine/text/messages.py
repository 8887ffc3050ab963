"""Chat messages as they come, in OpenAI's forms: checked, and as plain data for a template."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from minivllm_engine.core.errors import RequestError

Message = Mapping[str, Any]

# Keys by which other tools send what would be lost here; with what to do instead.
_NOT_READ = {
    "function_call": "write it into tool_calls",
    "images": "images are not supported",
    "audio": "audio is not supported",
    "prefix": "write continue_final_message beside messages",
}


def read_messages(value: object) -> list[dict[str, Any]]:
    """Check messages and copy them: keys that are null are left out, arguments of calls are objects.

    Raises:
        RequestError: it is no list of objects, empty, or a message is not what templates understand;
            the place is named.
    """
    if not isinstance(value, list | tuple):
        raise RequestError("messages: not a list of objects", why=f"got {value!r}"[:200])
    if not value:
        raise RequestError("messages is empty", code="empty_prompt")
    try:
        return [_read_message(message, f"messages[{i}]") for i, message in enumerate(value)]
    except RecursionError:
        raise RequestError("messages are nested too deeply") from None


def joined_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its text parts as one text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": "".join(part["text"] for part in content)}


def _read_message(message: object, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{place} should be an object", why=f"got {message!r}"[:200])
    plain = {key: one for key, one in _plain(message, place).items() if one is not None}
    if not isinstance(plain.get("role"), str):
        raise RequestError(f"{place} has no role")
    for key, instead in _NOT_READ.items():
        if plain.get(key):
            raise RequestError(f"{place}.{key} is not read; {instead}")
    if plain.get("tool_calls"):
        plain["tool_calls"] = _read_calls(plain["tool_calls"], f"{place}.tool_calls")
    elif "content" not in plain and "reasoning_content" not in plain:
        raise RequestError(f"{place} has no content")
    _check_content(plain.get("content", ""), f"{place}.content")
    return plain


def _check_content(content: object, place: str) -> None:
    if not isinstance(content, str | list):
        raise RequestError(f"{place} should be a string", why=f"got {content!r}"[:200])
    for number, part in enumerate(content if isinstance(content, list) else ()):
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise RequestError(
                f'{place}[{number}] should be {{"type": "text", "text": "..."}}; '
                "other parts are not supported"
            )


def _read_calls(calls: object, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RequestError(f"{place} should be an array of objects")
    return [_read_call(call, f"{place}[{i}]") for i, call in enumerate(calls)]


def _read_call(call: dict[str, Any], place: str) -> dict[str, Any]:
    if "function" not in call:  # the flat form of older templates
        return _with_arguments(call, place)
    if not isinstance(call["function"], dict):
        raise RequestError(f"{place}.function should be an object")
    return call | {"function": _with_arguments(call["function"], f"{place}.function")}


def _with_arguments(function: dict[str, Any], place: str) -> dict[str, Any]:
    """Parse the arguments, which OpenAI sends as text; templates iterate an object."""
    if not isinstance(function.get("name"), str):
        raise RequestError(f"{place}.name should be a string")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{place}.arguments is not JSON: {error}") from None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise RequestError(f"{place}.arguments should be a JSON object")
    return function | {"arguments": arguments}


def _plain(value: Any, place: str) -> Any:
    """Copy JSON data. What else Python can hold, with its methods, is nothing for a template."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(one, f"{place}.{key}") for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(one, f"{place}[{i}]") for i, one in enumerate(value)]
    raise RequestError(f"{place} is no JSON data", why=f"got {type(value).__name__}")


def plain_tools(tools: object) -> list[dict[str, Any]] | None:
    """Check tool descriptions and copy them; None for none.

    Raises:
        RequestError: they are no list of objects.
    """
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(one, Mapping) for one in tools):
        raise RequestError("tools should be an array of objects")
    found: list[dict[str, Any]] = _plain(tools, "tools")
    return found or None
