"""Patterns of tensor names: as a user writes them, and as the mapping table and the errors print them.

`*` is one segment between two dots, `**` one or more, `{0-2,7}` one of these numbers.
"""

import difflib
import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from minivllm_engine.core.escape import escape

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# Characters of a pattern that anybody would copy.
LONGEST = 160
_SPECIAL = re.compile(r"(?<![^.])(\*\*|\*|\{[0-9][0-9,\-]*\})(?![^.])")
_BRACES = re.compile(r"\{[0-9][0-9,\-]*\}")


def placeholders(pattern: str) -> int:
    """Say how many parts of a pattern stand for something else."""
    return len(_SPECIAL.findall(pattern))


def special_segments(pattern: str) -> list[tuple[int, str]]:
    """Say where each of these parts begins, and its text."""
    return [(found.start(), found[0]) for found in _SPECIAL.finditer(pattern)]


def as_regex(pattern: str) -> re.Pattern[str]:
    """Return an expression for `fullmatch`, with a group for each placeholder."""
    parts = _SPECIAL.split(pattern)
    return re.compile("".join(_expression(part) for part in parts), re.DOTALL)


def filled(pattern: str, values: Iterable[str]) -> str:
    """Replace the placeholders of `pattern` by `values`, from the left."""
    parts = iter(values)
    return _SPECIAL.sub(lambda _: next(parts), pattern)


def matches(name: str, globs: Iterable[str]) -> bool:
    """Say whether `name` matches one of these globs (`*` stands for anything), such a pattern, or is it."""
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


# More numbers than any model has layers: what is asked for is every number.
_MOST_NUMBERS = 10_000
# A pair of braces, or half a one; braces in a glob that can only be meant as numbers.
_ANY_BRACES, _NUMBER_BRACES = re.compile(r"\{[^{}]*\}|[{}]"), re.compile(r"\{[0-9,\-\s]*\}")
_ITEM = re.compile(r"(0|[1-9][0-9]*)(?:-(0|[1-9][0-9]*))?")
# Names that a model has are made of these, and a pattern that becomes one of them too.
_OF_A_TARGET = re.compile(r"[A-Za-z0-9_.*{},\-]*")

_NUMBERS = "{0-2,7} stands for one of the numbers 0, 1, 2 and 7"
_A_LINE_EACH = "Write a line for each name of that segment."

Side = Literal["source", "target"]


@dataclass(frozen=True, slots=True)
class Mistake:
    """Something in a pattern that cannot be meant.

    Attributes:
        side: of a pair, the side that it is on.
        at: index of its first character in the pattern.
    """

    side: Side
    at: int
    what: str
    why: str
    hint: str


def mistake_in_pair(source: str, target: str | None) -> Mistake | None:
    """Find the first mistake of a line SOURCE: TARGET of a mapping; target None drops the tensor."""
    if not source or target == "":
        why = "a line names tensors of the source, and what they are called"
        hint = "SOURCE: TARGET, or SOURCE: null to drop a tensor."
        return Mistake("target" if source else "source", 0, "an empty pattern", why, hint)
    found = _in_pattern("source", source)
    if target is not None:
        found = found or _in_pattern("target", target) or _in_target(source, target)
    return found


def mistake_in_glob(glob: str) -> Mistake | None:
    """Find the first mistake of a glob, in which only numbers in braces can be wrong."""
    found = (_in_numbers("source", m.start(), m[0]) for m in _NUMBER_BRACES.finditer(glob))
    return next(filter(None, found), None)


def _in_pattern(side: Side, pattern: str) -> Mistake | None:
    at = 0
    for segment in pattern.split("."):
        if not segment:
            why = "names have something before, between and after their dots"
            return Mistake(side, at, "an empty segment", why, "Take a dot away.")
        if "*" in segment and segment not in ("*", "**"):
            why = "* stands for one whole segment between two dots, ** for one or more"
            star = at + segment.index("*")
            return Mistake(side, star, "a * inside a segment", why, _A_LINE_EACH)
        braces = _ANY_BRACES.search(segment)
        if braces is not None:
            start = at + braces.start()
            if len(braces[0]) == 1:
                what = "a brace without its other half"
                return Mistake(side, start, what, _NUMBERS, "Close it, or take it away.")
            if braces[0] != segment:
                why = f"{_NUMBERS}, between two dots"
                return Mistake(side, start, "braces inside a segment", why, _A_LINE_EACH)
            wrong = _in_numbers(side, at, segment)
            if wrong:
                return wrong
        at += len(segment) + 1
    return None


def _in_target(source: str, target: str) -> Mistake | None:
    good = _OF_A_TARGET.match(target)
    end = good.end() if good else 0
    if end < len(target):
        return Mistake(
            "target",
            end,
            f"{target[end]!r} in the name of a target",
            "names of a model have letters, digits, _ and dots; what * and ** stand for on the left is "
            "filled in for the same sign on the right, in order",
            "A name as --dry-run lists it, such as layers.*.mlp.up_proj.weight.",
        )
    right, left = special_segments(target), special_segments(source)
    if len(right) > len(left):
        why = f"each sign is filled in from one on the left, which has {len(left)}"
        at = right[len(left)][0]
        return Mistake("target", at, "more * than on the left", why, "Write as many on the left.")
    for (at, sign), (_, other) in zip(right, left, strict=False):
        if sign.startswith("{") and sign != other:
            what = f"{sign} where the left has {other}"
            why = "what the left stands for is filled in, and no other number chosen"
            hint = f"Write {other} here too, or a line for each number."
            return Mistake("target", at, what, why, hint)
    return None


def _in_numbers(side: Side, at: int, braces: str) -> Mistake | None:
    """What is wrong with `{0-2,7}`, which begins at `at`."""
    if braces == "{}":
        return Mistake(side, at, "{} stands for no number", _NUMBERS, "* stands for any.")
    count = 0
    for item in braces[1:-1].split(","):
        match = _ITEM.fullmatch(item)
        if match is None:
            what = f"{item!r} is no number and no range of two"
            hint = "Without blanks and leading zeros; * stands for any segment."
            return Mistake(side, at, what, _NUMBERS, hint)
        first, last = match[1], match[2] or match[1]
        # A number too long to be counted is too many too.
        if max(len(first), len(last)) > len(str(_MOST_NUMBERS)):
            count = _MOST_NUMBERS + 1
            break
        if int(last) < int(first):
            why = f"{first} is more than {last}, so it stands for no number"
            return Mistake(side, at, f"the range {item} is empty", why, f"Write {last}-{first}.")
        count += int(last) - int(first) + 1
    if count > _MOST_NUMBERS:
        why = f"no model has more than {_MOST_NUMBERS:,} layers"
        return Mistake(side, at, "too many numbers in braces", why, "* stands for any number.")
    return None


def pattern_of(name: str) -> str:
    """`name` with `*` for its numbers."""
    return _NUMBER.sub("*", f".{name}.")[1:-1]


def filled_pattern(pattern: str, names: list[str]) -> str:
    """Narrow `pattern` to these names alone, where it has one number."""
    if len(names) == 1:
        return names[0]
    numbers = [_NUMBER.search(f".{name}.") for name in names]
    if pattern.count("*") != 1:
        return pattern
    return pattern.replace("*", "{" + _ranges([int(match[0]) for match in numbers if match]) + "}")


def _ranges(numbers: list[int]) -> str:
    """3,4,5,8 as "3-5,8"."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(
        ",".join(map(str, part)) if len(part) < 3 else f"{part[0]}-{part[-1]}" for part in parts
    )


def nearest(pattern: str, others: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Find up to 2 of `others` within a fifth of `pattern`'s length, nearest first, and the edits."""
    close = difflib.get_close_matches(pattern, sorted(set(others) - {pattern}), n=5, cutoff=0.75)
    ranked = sorted((edits(pattern, other), other) for other in close)
    limit = max(2, len(pattern) // 5)
    return tuple((other, distance) for distance, other in ranked[:2] if distance <= limit)


def edits(first: str, second: str) -> int:
    """Count the single characters to add, remove or replace (Levenshtein's distance)."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(second, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


def glob_of(name: str, count: int = 1) -> str:
    """Make a glob for a name, or a pattern of `count` names, that can be printed and typed."""
    if count == 1 and escape(name) == name and not mistake_in_glob(name):
        return name
    signs = "*?[" if count == 1 else "?["
    half = LONGEST // 2
    short = name if len(name) <= LONGEST else f"{name[:half]}\0{name[-half:]}"
    glob = "".join(
        c if c == "\0" else "?" if not c.isprintable() else f"[{c}]" if c in signs else c
        for c in short
    )
    if mistake_in_glob(glob):
        glob = glob.replace("{", "?").replace("}", "?")
    return glob.replace("\0", "*")
