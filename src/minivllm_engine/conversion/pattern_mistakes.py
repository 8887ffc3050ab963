"""What cannot be meant in a pattern of names: found where it stands, with the reason and a way out."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from minivllm_engine.conversion.patterns import placeholders, special_segments

# More numbers than any model has layers: what is asked for is every number.
_MOST_NUMBERS = 10_000
_BRACES = re.compile(r"\{[^{}]*\}|[{}]")
# Braces in a glob that can only be meant as numbers; others may be part of a name.
_NUMBER_BRACES = re.compile(r"\{[0-9,\-\s]*\}")
_ITEM = re.compile(r"(0|[1-9][0-9]*)(?:-(0|[1-9][0-9]*))?")
# Names that a model has are made of these, and a pattern that becomes one of them too.
_OF_A_TARGET = re.compile(r"[A-Za-z0-9_.*{},\-]*")

_NUMBERS = "{0-2,7} stands for one of the numbers 0, 1, 2 and 7"


@dataclass(frozen=True, slots=True)
class Mistake:
    """Something in a pattern that cannot be meant.

    Attributes:
        side: of a pair, the side that it is on.
        at: index of its first character in the pattern.
    """

    side: Literal["source", "target"]
    at: int
    what: str
    why: str
    hint: str


def mistake_in_pair(source: str, target: str | None) -> Mistake | None:
    """The first mistake of a line SOURCE: TARGET of a mapping; target None drops the tensor."""
    return next(_of_pair(source, target), None)


def mistake_in_glob(glob: str) -> Mistake | None:
    """The first mistake of a glob, in which only numbers in braces can be wrong."""
    for braces in _NUMBER_BRACES.finditer(glob):
        wrong = _numbers(braces[0])
        if wrong:
            return Mistake("source", braces.start(), *wrong)
    return None


def _of_pair(source: str, target: str | None) -> Iterator[Mistake]:
    if not source or target == "":
        yield Mistake(
            "source" if not source else "target",
            0,
            "an empty pattern",
            "a line names tensors of the source, and what they are called",
            "SOURCE: TARGET, or SOURCE: null to drop a tensor.",
        )
        return
    yield from _of_pattern("source", source)
    if target is not None:
        yield from _of_pattern("target", target)
        yield from _of_target(source, target)


def _of_pattern(side: Literal["source", "target"], pattern: str) -> Iterator[Mistake]:
    at = 0
    for segment in pattern.split("."):
        if not segment:
            yield Mistake(
                side,
                at,
                "an empty segment",
                "names have something before, between and after their dots",
                "Take a dot away.",
            )
        elif "*" in segment and segment not in ("*", "**"):
            yield Mistake(
                side,
                at + segment.index("*"),
                "a * inside a segment",
                "* stands for one whole segment between two dots, ** for one or more",
                "Write a line for each name of that segment.",
            )
        yield from _in_segment(side, segment, at)
        at += len(segment) + 1


def _in_segment(side: Literal["source", "target"], segment: str, at: int) -> Iterator[Mistake]:
    braces = _BRACES.search(segment)
    if braces is None:
        return
    if len(braces[0]) == 1:
        hint = "Close it, or take it away."
        yield Mistake(side, at + braces.start(), "a brace without its other half", _NUMBERS, hint)
        return
    if braces[0] != segment:
        yield Mistake(
            side,
            at + braces.start(),
            "braces inside a segment",
            f"{_NUMBERS}, between two dots",
            "Write a line for each name of that segment.",
        )
        return
    wrong = _numbers(segment)
    if wrong:
        yield Mistake(side, at, *wrong)


def _of_target(source: str, target: str) -> Iterator[Mistake]:
    good = _OF_A_TARGET.match(target)
    end = good.end() if good else 0
    if end < len(target):
        yield Mistake(
            "target",
            end,
            f"{target[end]!r} in the name of a target",
            "names of a model have letters, digits, _ and dots; what * and ** stand for on the left is "
            "filled in for the same sign on the right, in order",
            "A name as --dry-run lists it, such as layers.*.mlp.up_proj.weight.",
        )
    if placeholders(target) > placeholders(source):
        at, _ = special_segments(target)[placeholders(source)]
        yield Mistake(
            "target",
            at,
            "more * than on the left",
            f"each sign is filled in from one on the left, which has {placeholders(source)}",
            "Write as many on the left.",
        )
        return
    for (at, right), (_, left) in zip(
        special_segments(target), special_segments(source), strict=False
    ):
        if right.startswith("{") and right != left:
            yield Mistake(
                "target",
                at,
                f"{right} where the left has {left}",
                "what the left stands for is filled in, and no other number chosen",
                f"Write {left} here too, or a line for each number.",
            )


def _numbers(braces: str) -> tuple[str, str, str] | None:
    """What, why and remedy, if `{0-2,7}` is not well formed."""
    if braces == "{}":
        return ("{} stands for no number", _NUMBERS, "* stands for any.")
    count = 0
    for item in braces[1:-1].split(","):
        match = _ITEM.fullmatch(item)
        if match is None:
            return _no_numbers(item)
        first, last = match[1], match[2] or match[1]
        if max(len(first), len(last)) > len(str(_MOST_NUMBERS)):
            return _too_many(f"numbers of {max(len(first), len(last)):,} digits")
        if int(last) < int(first):
            return (
                f"the range {item} is empty",
                f"{first} is more than {last}, so it stands for no number",
                f"Write {last}-{first}.",
            )
        count += int(last) - int(first) + 1
    return _too_many(f"{count:,} numbers") if count > _MOST_NUMBERS else None


def _no_numbers(item: str) -> tuple[str, str, str]:
    shown = repr(item)
    if not item:
        return ("nothing beside a comma", _NUMBERS, "Take a comma away.")
    if re.search(r"\s", item):
        return (f"a blank in {shown}", _NUMBERS, "Take the blank away.")
    if re.fullmatch(r"[0-9]+(-[0-9]+)?", item):
        return (f"a leading 0 in {shown}", "numbers in names have none", "Take the 0 away.")
    if item.startswith("-"):
        return (f"{shown} is no number", "layers are counted from 0", "Write 0-2, or a number.")
    if item.endswith("-"):
        return (f"{shown} is a range without an end", _NUMBERS, "Write its last number, or *.")
    return (
        f"{shown} is no number and no range of two",
        _NUMBERS,
        "* stands for any segment; or write a line for each.",
    )


def _too_many(what: str) -> tuple[str, str, str]:
    why = f"no model has more than {_MOST_NUMBERS:,} layers"
    return (f"{what} in braces", why, "* stands for any number.")
