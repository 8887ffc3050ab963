"""What form an answer must have, as a request says it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

StructuredKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Structured:
    """A form that an answer must have: its kind, and the text that says it.

    Attributes:
        text: a JSON schema or a list of choices as JSON, a regular expression, a grammar (Lark or GBNF);
            "" for a JSON object.
    """

    kind: StructuredKind
    text: str = ""

    @classmethod
    def read(cls, value: Any) -> "Structured | None":
        """Read `{kind: content}` with one kind. None, and what is read already, stay as they are.

        Raises:
            ValueError: it is something else.
        """
        if value is None or isinstance(value, cls):
            return value
        kinds = get_args(StructuredKind)
        if not isinstance(value, Mapping) or len(value) != 1 or not set(value) <= set(kinds):
            raise ValueError(f"should be an object with one of {', '.join(kinds)}")
        ((kind, content),) = value.items()
        return cls(kind, _text_of(kind, content))

    def as_json(self) -> dict[str, Any]:
        """Return what `read` takes, as it stands in a record."""
        if self.kind == "json_object":
            return {self.kind: True}
        return {self.kind: json.loads(self.text) if self.kind in _AS_JSON else self.text}


_AS_JSON = ("json_schema", "choice")


def _text_of(kind: str, content: Any) -> str:
    if kind == "json_object":
        if content is not True:
            raise ValueError("json_object should be true")
        return ""
    if kind == "json_schema":
        if isinstance(content, str):
            content = _parsed(content)
        if not isinstance(content, Mapping | bool):
            raise ValueError("json_schema should be an object")
        return _dumped(content)
    if kind == "choice":
        if not isinstance(content, list | tuple) or not content:
            raise ValueError("choice should be a list of texts")
        if not all(isinstance(one, str) and one for one in content):
            raise ValueError("choice should be a list of texts that are not empty")
        return _dumped(list(content))
    if not isinstance(content, str) or not content:
        raise ValueError(f"{kind} should be a text")
    return content


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("json_schema is not JSON") from None


def _dumped(content: Any) -> str:
    try:
        return json.dumps(content, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ValueError("cannot be written as JSON") from None
