"""Section `bench` of a config file."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from minivllm_cli.config.number_lists import read_counts, read_lengths, read_percentiles
from minivllm_engine.core.config import Count

WORKLOADS = ("prefill", "decode", "mixed", "prefix")
JSONL = "jsonl:"
SuiteName = Literal["quick", "standard", "long", "stages", "prefix"]
# Keys that say what a workload looks like: a suite brings its own.
SHAPING = ("batch", "prompt_len", "gen_len", "depth", "num_prompts", "groups")


def _workload(value: str | None) -> str | None:
    if value is None or value in WORKLOADS:
        return value
    if value.startswith(JSONL) and value != JSONL:
        return value
    raise ValueError(f"should be one of {', '.join(WORKLOADS)} or jsonl:FILE")


def _at_least_one(values: tuple[int, ...]) -> tuple[int, ...]:
    if min(values) < 1:
        raise ValueError("should be at least 1")
    return values


def _no_zero(values: tuple[int | str, ...]) -> tuple[int | str, ...]:
    if 0 in values:
        raise ValueError("should be at least 1")
    return values


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
    batch: Annotated[Counts, AfterValidator(_at_least_one)] = (1, 8)
    prompt_len: Lengths = (512,)
    gen_len: Lengths = (128,)
    depth: Counts = (0,)
    num_prompts: Annotated[Count, Field(ge=1)] | None = None
    groups: Annotated[Count, Field(ge=1)] = 1
    reps: Annotated[Count, Field(ge=1)] = 5
    warmup: Annotated[Count, Field(ge=0)] = 2
    percentiles: Percentiles = (50.0, 90.0, 95.0, 99.0)
