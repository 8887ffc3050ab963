"""Problems told once for all layers that share them, with the names that may have been meant."""

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from minivllm_engine.conversion.plan import PROBLEM_WORDS, Problem, ProblemKind

# Problems of one kind for which near names are looked for: a source of noise is not worth the time.
_MOST_WITH_NEAREST = 200
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def pattern_of(name: str) -> str:
    """`name` with `*` for its numbers."""
    return _NUMBER.sub("*", f".{name}.")[1:-1]


def grouped(
    kind: ProblemKind,
    named: Iterable[tuple[str, str]],
    *,
    near: Callable[[list[str]], tuple[tuple[str, int], ...]] = lambda _: (),
    finish: Callable[[Problem, list[str]], Problem] = lambda problem, _: problem,
) -> list[Problem]:
    """One problem for all names of one pattern and one detail.

    Args:
        named: (name, detail) of each tensor.
        near: the names that may be meant by such a group of names.
        finish: adds to a problem what can be done about it, given its names.
    """
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name, detail in named:
        groups[pattern_of(name), detail].append(name)
    problems: list[Problem] = []
    for (pattern, detail), names in groups.items():
        close = near(names) if len(problems) < _MOST_WITH_NEAREST else ()
        problem = Problem(kind, filled_pattern(pattern, names), len(names), detail, close)
        problems.append(finish(problem, names))
    return problems


def nearest(pattern: str, others: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Up to 2 of `others` within a fifth of `pattern`'s length, nearest first, with the edits between."""
    close = difflib.get_close_matches(pattern, sorted(set(others) - {pattern}), n=5, cutoff=0.75)
    ranked = sorted((edits(pattern, other), other) for other in close)
    limit = max(2, len(pattern) // 5)
    return tuple((other, distance) for distance, other in ranked[:2] if distance <= limit)


def edits(first: str, second: str) -> int:
    """Levenshtein's distance: single characters added, removed or replaced."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(second, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


def filled_pattern(pattern: str, names: list[str]) -> str:
    """`pattern` for these names alone, where it has one number."""
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


def counted(problems: Iterable[Problem]) -> list[str]:
    """How many tensors each kind of problem concerns: ["1 unmatched", "2 missing"]."""
    counts: dict[ProblemKind, int] = dict.fromkeys(PROBLEM_WORDS, 0)
    for problem in problems:
        counts[problem.kind] += problem.count
    return [f"{counts[kind]:,} {words}" for kind, words in PROBLEM_WORDS.items() if counts[kind]]
