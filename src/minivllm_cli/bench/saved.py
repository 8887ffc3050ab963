"""What `--save` wrote, read back for a comparison. Nothing in it is trusted."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from minivllm_cli.generate.strict_json import BadJson, parse_object
from minivllm_cli.problems import CliError

_MOST_BYTES = 256 << 20
_Finite = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("holds control characters")
    return text


Name = Annotated[str, Field(max_length=1000), AfterValidator(_printable)]


class _Part(BaseModel):
    # What a later version adds is left out.
    model_config = ConfigDict(extra="ignore", strict=True)


class SavedSample(_Part):
    """The metrics that `--metric` knows; None where the workload has none."""

    tok_s: _Finite
    wall_s: _Finite
    itl_ms: _Finite | None = None
    ttft_ms: _Finite | None = None
    queue_ms: _Finite | None = None
    tpot_ms: _Finite | None = None
    e2e_ms: _Finite | None = None


METRICS = tuple(SavedSample.model_fields)


class SavedRow(_Part):
    """An arm of a workload."""

    workload: dict[Name, Name | int | None]
    arm: Name
    samples: Annotated[list[SavedSample], Field(min_length=1, max_length=100_000)]

    def num_samples(self, metric: str) -> int:
        """Of these, how many have `metric`."""
        return sum(getattr(sample, metric) is not None for sample in self.samples)


class SavedModel(_Part):
    name: Name
    hash: Name


class SavedDevice(_Part):
    kind: Name
    name: Name


class SavedRun(_Part):
    """A document of `bench`."""

    schema_version: Literal[1]
    kind: Literal["bench"]
    complete: bool
    argv: Annotated[list[Name], Field(max_length=1000)] = []
    env: dict[Name, Any]
    config: dict[Name, Any]
    model: SavedModel
    device: SavedDevice
    rows: Annotated[list[SavedRow], Field(max_length=10_000)]


def read_run(path: Path) -> SavedRun:
    """Read a saved run.

    Raises:
        CliError: the file cannot be read, or is nothing that `bench --save` writes.
    """
    hint = "FILE of: minivllm bench --save FILE"
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                raise CliError(f"{path} is too large to be a saved run", hint=hint)
            data = file.read(_MOST_BYTES)
    except OSError as error:
        raise CliError(f"{path} cannot be read", why=error.strerror, hint=hint) from None
    try:
        return SavedRun.model_validate(parse_object(data.decode("utf-8")))
    except UnicodeDecodeError:
        raise CliError(f"{path} is no JSON", why="it is not UTF-8", hint=hint) from None
    except BadJson as error:
        raise CliError(f"{path} is no saved run", why=error.message, hint=hint) from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        raise CliError(
            f"{path} is no saved run", why=f"{place}: {first['msg']}"[:300], hint=hint
        ) from None


def more_repetitions(argv: Sequence[str], path: Path, reps: int) -> list[str]:
    """The command line that made the file `path`, with `reps` repetitions and in place of that file."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        name, _, value = word.partition("=")
        if name in ("--reps", "--save"):
            if word == name:
                next(words, None)
        elif word == "--set":
            assignment = next(words, "")
            kept += [] if _sets_reps(assignment) else [word, assignment]
        elif word != "--overwrite" and not (name == "--set" and _sets_reps(value)):
            kept.append(word)
    return [*kept, "--reps", str(reps), "--save", str(path), "--overwrite"]


def _sets_reps(assignment: str) -> bool:
    return assignment.partition("=")[0].strip() == "bench.reps"
