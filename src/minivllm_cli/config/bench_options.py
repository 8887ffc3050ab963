"""Section `bench` of a config file, and its lists of numbers as they are typed: 1,8,64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from minivllm_engine.core.config import Count
from minivllm_engine.core.units import parse_count

WORKLOADS = ("prefill", "decode", "mixed", "prefix")
JSONL = "jsonl:"
SuiteName = Literal["quick", "standard", "long", "stages", "prefix"]
# Keys that say what a workload looks like: a suite brings its own.
SHAPING = ("batch", "prompt_len", "gen_len", "depth", "num_prompts", "groups")
_MOST = 64


@dataclass(frozen=True, order=True, slots=True)
class Length:
    """Tokens of a request: `low` of them, or drawn evenly from `low` to `high`."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}~{self.high}"


def read_counts(value: object) -> tuple[int, ...]:
    """Read whole numbers from 0: 8, "8k", "1,8,64" or a list.

    Raises:
        ValueError: it is none of these, or more than 64 numbers.
    """
    return tuple(_all(value, _count))


def read_lengths(value: object) -> tuple[int | str, ...]:
    """Read counts from 1; "100~1024" stands for lengths that each request draws between these.

    What means the same is written the same: "5~5" is 5, and "1~1k" is "1~1000".

    Raises:
        ValueError: as `read_counts`, or a length of nothing.
    """
    return tuple(_all(value, _length))


def as_length(value: int | str) -> Length:
    """Read an entry of what `read_lengths` gives.

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
    """Read percentiles, in ascending order: 50, "50,99" or a list.

    Raises:
        ValueError: one of them is not between 0 and 100.
    """
    return tuple(sorted(_all(value, _percentile)))


def _all(value: object, read: Callable[[object], Any]) -> list[Any]:
    parts: list[object] = []
    for entry in value if isinstance(value, list | tuple) else [value]:
        parts += entry.split(",") if isinstance(entry, str) else [entry]
    if not parts:
        raise ValueError("an empty list")
    if len(parts) > _MOST:
        raise ValueError(f"{len(parts)} values are too many; at most {_MOST}")
    return list(dict.fromkeys(map(read, parts)))


def _count(text: object) -> int:
    number = parse_count(text)
    if number < 0:
        raise ValueError(f"{number} is below 0")
    return number


def _length(text: object) -> int | str:
    if isinstance(text, str) and "~" in text:
        length = as_length(text)
        return length.low if length.low == length.high else str(length)
    return _count(text)


def _percentile(text: object) -> float:
    try:
        number = float(str(text))
    except ValueError:
        number = -1.0
    if isinstance(text, bool) or not 0 <= number <= 100:
        raise ValueError(f"{text!r} is not between 0 and 100")
    return number


def _no_zero(values: tuple[int | str, ...]) -> tuple[int | str, ...]:
    if 0 in values:
        raise ValueError("should be at least 1")
    return values


def _workload(value: str | None) -> str | None:
    if value is None or value in WORKLOADS or (value.startswith(JSONL) and value != JSONL):
        return value
    raise ValueError(f"should be one of {', '.join(WORKLOADS)} or jsonl:FILE")


Counts = Annotated[tuple[int, ...], BeforeValidator(read_counts)]
Lengths = Annotated[tuple[int | str, ...], BeforeValidator(read_lengths), AfterValidator(_no_zero)]
Percentiles = Annotated[tuple[float, ...], BeforeValidator(read_percentiles)]


class BenchOptions(BaseModel):
    """Section `bench`: what is measured, and how often.

    Attributes:
        workload: None runs `suite`. SHAPING belongs to a workload.
        num_prompts: requests of a row; None for as many as `batch`.
        groups: of the workload `prefix`: prefixes that requests share.
        reps: of each row; the suite `quick` makes 3 where nothing is set.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    suite: SuiteName = "standard"
    workload: Annotated[str | None, AfterValidator(_workload)] = None
    batch: Annotated[Counts, AfterValidator(_no_zero)] = (1, 8)
    prompt_len: Lengths = (512,)
    gen_len: Lengths = (128,)
    depth: Counts = (0,)
    num_prompts: Annotated[Count, Field(ge=1)] | None = None
    groups: Annotated[Count, Field(ge=1)] = 1
    reps: Annotated[Count, Field(ge=1)] = 5
    warmup: Annotated[Count, Field(ge=0)] = 2
    percentiles: Percentiles = (50.0, 90.0, 95.0, 99.0)
