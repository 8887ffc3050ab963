"""How much a fuzz test tries, little in `make test` and more in `make fuzz`; JSON documents with edits."""

import copy
import os
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import strategies as st

from minivllm_engine.core.errors import EngineError

Result = TypeVar("Result")


def examples(few: int) -> int:
    """Return how many examples a fuzz test draws: `few` times FUZZ_TIMES, or `few`."""
    return few * int(os.environ.get("FUZZ_TIMES", "1"))


def attempt(call: Callable[[], Result]) -> Result | EngineError:
    """Return the result of a call, or the error of ours that it raised."""
    try:
        return call()
    except EngineError as error:
        return error


def nested(depth: int, *, is_list: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if is_list else {"a": value}
    return value


NUMBERS = st.sampled_from([0, -1, 1, 2**63, 10**30, 10**400, 5e-324, 1e-300, 1e18, 1e308, 0.5])
TEXTS = st.one_of(st.text(max_size=8), st.sampled_from(["\x1b[2J", "\udc80", "a\nb", "x" * 3000]))
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.floats(allow_nan=False), TEXTS)
VALUES = st.one_of(
    SCALARS,
    st.builds(nested, st.integers(1, 1200), is_list=st.booleans()),
    st.lists(SCALARS, max_size=3),
    st.dictionaries(TEXTS, SCALARS, max_size=3),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document, but the document."""
    found = [path] if path else []
    if isinstance(value, dict | list):
        keys = value.keys() if isinstance(value, dict) else range(len(value))
        for key in keys:
            found += places(value[key], (*path, key))
    return found


def edited(good: dict[str, Any], edits: list[tuple[int, str, Any]]) -> dict[str, Any]:
    """A good document with some places taken out, replaced, doubled or given a new neighbour."""
    document = copy.deepcopy(good)
    for number, how, value in edits:
        known = places(document)
        if len(known) > 500 or not known:
            break
        *path, last = known[number % len(known)]
        owner = document
        for key in path:
            owner = owner[key]
        if how == "drop":
            del owner[last]
        elif how == "replace":
            owner[last] = value
        elif isinstance(owner, list):
            owner.append(copy.deepcopy(owner[last]) if how == "double" else value)
        else:
            owner[value if isinstance(value, str) else "new"] = value
    return document


EDITS = st.lists(
    st.tuples(
        st.integers(0, 10_000), st.sampled_from(["drop", "replace", "double", "add"]), VALUES
    ),
    min_size=1,
    max_size=4,
)
