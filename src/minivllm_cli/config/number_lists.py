"""Lists of numbers as they are written on a command line: 1,8,64 and 1-64*2."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from minivllm_engine.core.units import parse_count

_RANGE = re.compile(r"([0-9][0-9_]*[kKM]?)-([0-9][0-9_]*[kKM]?)(?:([+*])([0-9]+))?")
_MOST = 64


@dataclass(frozen=True, order=True, slots=True)
class Length:
    """Tokens of a request: `low` of them, or drawn evenly from `low` to `high`."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}~{self.high}"


def read_counts(value: object) -> tuple[int, ...]:
    """Whole numbers: 8, "8k", "1,8,64", "1-4" (1, 2, 3, 4), "1-64*2" (1, 2, 4 ...), "0-8+4", or a list.

    Raises:
        ValueError: it is none of these, or more than 64 numbers.
    """
    return tuple(_all(value, lambda text: list(_one_or_range(text))))


def read_lengths(value: object) -> tuple[int | str, ...]:
    """As `read_counts`; "100~1024" stands for lengths that each request draws between these.

    What means the same is written the same: "5~5" is 5, and "1~1k" is "1~1000".

    Raises:
        ValueError: as `read_counts`, or a length of nothing.
    """
    return tuple(_all(value, _lengths))


def as_length(value: int | str) -> Length:
    """An entry of what `read_lengths` gives.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, int):
        return Length(value, value)
    low, _, high = value.partition("~")
    length = Length(parse_count(low), parse_count(high))
    if not 0 < length.low <= length.high:
        raise ValueError(f"{value!r} is no span of lengths (like 100~1024)")
    return length


def read_percentiles(value: object) -> tuple[float, ...]:
    """Percentiles, ascending: 50, "50,99" or a list.

    Raises:
        ValueError: one of them is not between 0 and 100.
    """
    found = _all(value, lambda text: [_percentile(text)])
    return tuple(sorted(set(found)))


def _percentile(text: object) -> float:
    try:
        number = float(str(text))
    except ValueError:
        number = -1.0
    if isinstance(text, bool) or not 0 <= number <= 100:
        raise ValueError(f"{text!r} is not between 0 and 100")
    return number


def _lengths(text: object) -> list[int | str]:
    if isinstance(text, str) and "~" in text:
        length = as_length(text)
        return [length.low] if length.low == length.high else [str(length)]
    return list(_one_or_range(text))


def _all(value: object, read: Callable[[object], list[Any]]) -> list[Any]:
    parts: list[object] = []
    for entry in value if isinstance(value, list | tuple) else [value]:
        parts += entry.split(",") if isinstance(entry, str) else [entry]
    found = [number for part in parts for number in read(part)]
    if not found:
        raise ValueError("an empty list")
    if len(found) > _MOST:
        raise ValueError(f"{len(found)} values are too many; at most {_MOST}")
    return list(dict.fromkeys(found))


def _one_or_range(text: object) -> Iterator[int]:
    match = _RANGE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        number = parse_count(text)
        if number < 0:
            raise ValueError(f"{number} is below 0")
        yield number
        return
    first, last, step = parse_count(match[1]), parse_count(match[2]), int(match[4] or 1)
    if first > last:
        raise ValueError(f"{text!r} goes down; write the smaller number first")
    if not step or (match[3] == "*" and (step < 2 or not first)):
        raise ValueError(f"{text!r} never gets to {last}")
    number, count = first, 0
    while number <= last and count <= _MOST:
        yield number
        count += 1
        number = number * step if match[3] == "*" else number + step
