"""Patterns of tensor names: as a user writes them, and as the mapping table and the errors print them.

`*` is one segment between two dots, `**` one or more, `{0-2,7}` one of these numbers. Patterns are looked at
by `pattern_mistakes` before they come here.
"""

import fnmatch
import re
from collections.abc import Iterable

_SPECIAL = re.compile(r"(?<![^.])(\*\*|\*|\{[0-9][0-9,\-]*\})(?![^.])")
_BRACES = re.compile(r"\{[0-9][0-9,\-]*\}")


def placeholders(pattern: str) -> int:
    """How many parts of a pattern stand for something else."""
    return len(_SPECIAL.findall(pattern))


def special_segments(pattern: str) -> list[tuple[int, str]]:
    """Where each of these parts begins, and its text."""
    return [(found.start(), found[0]) for found in _SPECIAL.finditer(pattern)]


def as_regex(pattern: str) -> re.Pattern[str]:
    """An expression for `fullmatch`, with a group for each placeholder."""
    parts = _SPECIAL.split(pattern)
    return re.compile("".join(_expression(part) for part in parts), re.DOTALL)


def filled(pattern: str, values: Iterable[str]) -> str:
    """`pattern` with its placeholders replaced by `values`, from the left."""
    parts = iter(values)
    return _SPECIAL.sub(lambda _: next(parts), pattern)


def matches(name: str, globs: Iterable[str]) -> bool:
    """Is `name` one of these globs, in which `*` stands for anything, or such a pattern, or just that?"""
    return any(
        name == glob or fnmatch.fnmatchcase(name, glob) or _matches_braces(name, glob)
        for glob in globs
    )


def _matches_braces(name: str, glob: str) -> bool:
    """A glob in which `{0-2,7}` stands for one of these numbers."""
    braces = _BRACES.search(glob)
    if braces is None:
        return False
    start = glob[: braces.start()]
    return any(
        matches(name, [f"{start}{number}{glob[braces.end() :]}"])
        for number in set(re.findall(r"(?<=\.)\d+(?=\.)", f".{name}."))
        if re.fullmatch(_expression(braces[0]), number)
    )


def _expression(part: str) -> str:
    if part == "**":
        return "(.+)"
    if part == "*":
        return "([^.]+)"
    if not _BRACES.fullmatch(part):
        return re.escape(part)
    numbers: list[str] = []
    for item in filter(None, part[1:-1].split(",")):
        first, dash, last = item.partition("-")
        if dash and first.isdigit() and last.isdigit():
            numbers += map(str, range(int(first), int(last) + 1))
        else:
            numbers.append(re.escape(item))
    return "(" + "|".join(numbers) + ")"
