"""JSON as one line of a file: strict when it is read, safe when it is written."""

import json
import math
import re
import sys
from typing import Any, NoReturn

# Legal inside a JSON string, yet line ends to many readers, or commands to a terminal.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029]")


class BadJson(Exception):
    """A line that is not what it should be; `column` counts characters from 1."""

    def __init__(self, message: str, column: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.column = column


def parse_object(text: str) -> dict[str, Any]:
    """Return the JSON object in `text`.

    Raises:
        BadJson: not JSON, not an object, a key twice, NaN, or a number that no float holds.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=lambda pairs: _unique(pairs, text),
            parse_constant=lambda name: _no_constant(name, text),
            parse_float=lambda digits: _finite(digits, text),
        )
    except json.JSONDecodeError as error:
        where = f" column {error.pos + 1}" if error.msg.endswith(" at") else ""
        raise BadJson(f"not JSON: {error.msg}{where}", error.pos + 1) from None
    except RecursionError:
        raise BadJson("not JSON: nested too deeply") from None
    except ValueError:  # what Python makes of an integer of thousands of digits
        raise _long_integer(text) from None
    if not isinstance(value, dict):
        raise BadJson(f"not a JSON object but {_kind(value)}", len(text) - len(text.lstrip()) + 1)
    return value


def _long_integer(text: str) -> BadJson:
    found = re.search(rf"\d{{{sys.get_int_max_str_digits() + 1},}}", text)
    if found is None:
        return BadJson("not JSON: a number is out of range")
    return BadJson(f"an integer of {len(found[0]):,} digits is too large", found.start() + 1)


def dump_line(value: Any) -> bytes:
    """Write `value` as one line of UTF-8 JSON with its newline.

    Lone surrogates become U+FFFD. No character in it ends a line but the last, and none is a control.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return encode_text(text) + b"\n"


def encode_text(text: str) -> bytes:
    """Encode as UTF-8, with U+FFFD for lone surrogates."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def column_of_key(text: str, key: str) -> int:
    """Return the column at which `key` stands in a line, or 1."""
    return max(text.find(json.dumps(key)), 0) + 1


def _unique(pairs: list[tuple[str, Any]], text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise BadJson(f"duplicate key {key!r}", max(text.rfind(json.dumps(key)), 0) + 1)
        found[key] = value
    return found


def _no_constant(name: str, text: str) -> NoReturn:
    raise BadJson(f"{name} is not JSON", max(text.find(name), 0) + 1)


def _finite(digits: str, text: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise BadJson(f"number {digits} is out of range", max(text.find(digits), 0) + 1)
    return number


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names = {list: "an array", str: "a string", int: "a number", float: "a number"}
    return names[type(value)]
