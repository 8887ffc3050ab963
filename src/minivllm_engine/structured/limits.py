"""What of a form is refused before it is compiled: that cannot be broken off, and may need any memory."""

import json
import math
from collections.abc import Mapping
from typing import Any

from minivllm_engine.core.errors import RequestError
from minivllm_engine.core.structured import Structured

MAX_TEXT = 64 * 1024
MAX_DEPTH = 64
MAX_PROPERTIES = 256
MAX_NODES = 2000
MAX_CHOICES = 2000
# Of all `multipleOf` of a schema together: those of an allOf become their common multiple.
MAX_MULTIPLE = 10_000


def too_large(what: str, found: int, most: int) -> RequestError:
    """Make the error for a form beyond a limit."""
    return RequestError(
        f"structured: {what}: {found:,}, at most {most:,} can be", code="unsupported_schema"
    )


def check_limits(form: Structured) -> None:
    """Refuse what is too large to be compiled.

    Raises:
        RequestError: code `unsupported_schema`.
    """
    size = len(form.text.encode("utf-8", "replace"))
    if size > MAX_TEXT:
        raise too_large("bytes", size, MAX_TEXT)
    if form.kind == "choice":
        count = len(json.loads(form.text))
        if count > MAX_CHOICES:
            raise too_large("choices", count, MAX_CHOICES)
    if form.kind == "json_schema":
        check_schema(json.loads(form.text))


def check_schema(schema: Any) -> None:
    """Refuse a JSON schema that is too large or too deep.

    Raises:
        RequestError: code `unsupported_schema`.
    """
    level, depth, nodes = [schema], 0, 0
    multiples: set[float] = set()
    while level:
        depth += 1
        nodes += sum(isinstance(one, Mapping) for one in level)
        if depth > MAX_DEPTH:
            raise too_large("levels", depth, MAX_DEPTH)
        if nodes > MAX_NODES:
            raise too_large("objects in a schema", nodes, MAX_NODES)
        below: list[Any] = []
        for one in level:
            if isinstance(one, Mapping):
                _check_object(one, multiples)
                below += one.values()
            elif isinstance(one, list):
                below += one
        level = [one for one in below if isinstance(one, Mapping | list)]
    _check_multiples(multiples)


def _check_object(one: Mapping[str, Any], multiples: set[float]) -> None:
    properties, values = one.get("properties"), one.get("enum")
    if isinstance(properties, Mapping) and len(properties) > MAX_PROPERTIES:
        raise too_large("properties of an object", len(properties), MAX_PROPERTIES)
    if isinstance(values, list) and len(values) > MAX_CHOICES:
        raise too_large("values of an enum", len(values), MAX_CHOICES)
    multiple = one.get("multipleOf")
    if isinstance(multiple, int | float) and not isinstance(multiple, bool):
        multiples.add(multiple)


def _check_multiples(multiples: set[float]) -> None:
    """An automaton has a state for each remainder, of each of them and of what several have in common."""
    states = 1
    for multiple in multiples:
        if not math.isfinite(multiple) or multiple <= 0:
            raise RequestError(
                f"structured: multipleOf {multiple}: should be above 0", code="unsupported_schema"
            )
        over, under = multiple.as_integer_ratio()
        digits = under if isinstance(multiple, int) else 10 ** _decimals(multiple)
        states = math.lcm(states, max(round(over * digits / under), 1))
    if states > MAX_MULTIPLE:
        raise too_large("states of multipleOf", states, MAX_MULTIPLE)


def _decimals(number: float) -> int:
    mantissa, _, exponent = f"{number!r}".partition("e")
    return max(len(mantissa.partition(".")[2].rstrip("0")) - int(exponent or 0), 0)
