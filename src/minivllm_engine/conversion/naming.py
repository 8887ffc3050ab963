"""Names of tensors: patterns as a user writes them, and the names of a source followed to bare ones.

`*` is one segment between two dots, `**` one or more, `{0-2,7}` one of these numbers.
"""

import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from minivllm_engine.checkpoint.names import (
    BareName,
    skip_rule,
    split_layer,
    without_roots,
    without_wrappers,
)
from minivllm_engine.checkpoint.safetensors_header import TensorEntry

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


# A mixer that holds one of these is a Gated DeltaNet.
_LINEAR_PARTS = re.compile(r"mixer\.(in_proj\w*|A_log|conv1d)(\..+)?")


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A source tensor and its name, step by step.

    Attributes:
        bare: the last name, without wrappers and roots.
        steps: (rule, name after it) of every rule that changed something.
        dropped: the rule that leaves it out, or None.
        renamed_by: pattern of the rename that matched, or None.
    """

    entry: TensorEntry
    bare: BareName
    steps: tuple[tuple[str, str], ...]
    dropped: str | None
    renamed_by: str | None = None


@dataclass(frozen=True, slots=True)
class _Rename:
    """as_stored: the pattern matches names of the file, and so is meant for these alone."""

    source: str
    expression: re.Pattern[str]
    target: str | None
    as_stored: bool

    def match(self, stored: str, bare: str) -> re.Match[str] | None:
        """stored: a name as it is in the file; bare: without wrappers and roots."""
        spellings = [stored]
        if not self.as_stored:
            spellings += [without_wrappers(stored), bare, split_layer(bare).canonical]
        found = (self.expression.fullmatch(spelling) for spelling in spellings)
        return next(filter(None, found), None)


def name_tensors(
    entries: Iterable[TensorEntry], renames: tuple[tuple[str, str | None], ...]
) -> list[NamedTensor]:
    """Follow every name. `renames`: see `ConvertOptions.renames`."""
    entries = list(entries)
    patterns = []
    for source, target in renames:
        expression = as_regex(source)
        as_stored = any(expression.fullmatch(entry.name) for entry in entries)
        patterns.append(_Rename(source, expression, target, as_stored))
    return _without_mixers([_named(entry, patterns) for entry in entries])


def _named(entry: TensorEntry, renames: list[_Rename]) -> NamedTensor:
    steps: list[tuple[str, str]] = []
    name = entry.name
    for rule, change in (("wrapper", without_wrappers), ("root", without_roots)):
        changed = change(name)
        if changed != name:
            steps.append((rule, changed))
            name = changed
    renamed_by = None
    for rename in renames:
        match = rename.match(entry.name, name)
        if match is None:
            continue
        if rename.target is None:
            return NamedTensor(entry, split_layer(name), tuple(steps), "rename", rename.source)
        name = without_roots(filled(rename.target, match.groups()))
        steps.append(("rename", name))
        renamed_by = rename.source
        break
    bare = split_layer(name)
    return NamedTensor(entry, bare, tuple(steps), skip_rule(bare), renamed_by)


def _without_mixers(named: list[NamedTensor]) -> list[NamedTensor]:
    """Run-time names: whether a layer's `mixer` is a DeltaNet or attention shows from what it holds."""
    parts: defaultdict[int | None, set[str]] = defaultdict(set)
    for tensor in named:
        if tensor.bare.tensor.startswith("mixer."):
            parts[tensor.bare.layer].add(tensor.bare.tensor)
    kinds = {
        layer: "linear_attn" if any(map(_LINEAR_PARTS.fullmatch, names)) else "self_attn"
        for layer, names in parts.items()
    }

    def resolved(tensor: NamedTensor) -> NamedTensor:
        if tensor.bare.layer is None or not tensor.bare.tensor.startswith("mixer."):
            return tensor
        name = kinds[tensor.bare.layer] + tensor.bare.tensor.removeprefix("mixer")
        bare = BareName(tensor.bare.layer, name)
        return replace(tensor, bare=bare, steps=(*tensor.steps, ("mixer", str(bare))))

    return [resolved(tensor) for tensor in named]
