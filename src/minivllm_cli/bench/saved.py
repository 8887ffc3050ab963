"""What `--save` wrote, read back for a comparison. Nothing in it is trusted."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from minivllm_cli.bench.workload import IDENTITY
from minivllm_cli.config.number_lists import read_lengths
from minivllm_cli.errors import CliError
from minivllm_engine.core.escape import escape
from minivllm_engine.protocol.strict_json import BadJson, parse_object

_MOST_BYTES = 256 << 20
_Finite = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, le=1e18, allow_inf_nan=False)]
_COUNTS = frozenset({"batch", *chain(*IDENTITY.values())} - {"file"})


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

    tok_s: _Positive
    wall_s: _Positive
    itl_ms: _Finite | None
    ttft_ms: _Finite | None
    queue_ms: _Finite | None
    tpot_ms: _Finite | None
    e2e_ms: _Finite | None


METRICS = tuple(SavedSample.model_fields)


def _workload(values: dict[str, Any]) -> dict[str, Any]:
    """What tells rows apart has to be there, in the form in which it is written."""
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in IDENTITY:
        raise ValueError(f"kind {escape(kind, 40)} is none of {', '.join(IDENTITY)}")
    missing = [key for key in ("batch", *IDENTITY[kind]) if key not in values]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    for key, value in values.items():
        if not _is_value(key, value):
            raise ValueError(f"{escape(key, 40)} cannot be {escape(value, 60)}")
    return values


def _is_value(key: str, value: Any) -> bool:
    if key in ("prompt_len", "gen_len") and isinstance(value, str):
        with suppress(ValueError):
            return read_lengths(value) == (value,)
        return False
    if key in ("kind", "file") or key not in _COUNTS:
        return isinstance(value, str | int) and str(value).isprintable()
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class SavedRow(_Part):
    """An variant of a workload."""

    workload: Annotated[dict[str, Any], AfterValidator(_workload)]
    variant: Name
    samples: Annotated[list[SavedSample], Field(min_length=1, max_length=100_000)]

    @property
    def key(self) -> str:
        """The same for the same row of another run."""
        return json.dumps([self.workload, self.variant], sort_keys=True)

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
    rows: Annotated[list[SavedRow], Field(min_length=1, max_length=10_000)]


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
        return _checked(parse_object(data.decode("utf-8")))
    except UnicodeDecodeError:
        raise CliError(f"{path} is no JSON", why="it is not UTF-8", hint=hint) from None
    except (BadJson, _NoRun) as error:
        raise CliError(f"{path} is no saved run", why=error.message, hint=hint) from None


class _NoRun(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def _checked(content: dict[str, Any]) -> SavedRun:
    try:
        run = SavedRun.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = _place(content, first["loc"])
        if first["type"] == "missing":
            raise _NoRun(f"{place} is missing") from None
        what = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        raise _NoRun(f"{place}: {what}"[:300]) from None
    seen: dict[str, int] = {}
    for number, row in enumerate(run.rows, 1):
        earlier = seen.setdefault(row.key, number)
        if earlier != number:
            raise _NoRun(f"{_row_name(content, number - 1)} is there twice, as row {earlier} too")
    return run


def _place(content: dict[str, Any], loc: tuple[int | str, ...]) -> str:
    """Where something is, as a person would say it: "row 2 (decode batch 8 graph), sample 3, tok_s"."""
    if not loc:
        return "the document"
    if loc[0] != "rows" or len(loc) < 2:
        return ".".join(map(str, loc))
    parts = [_row_name(content, int(loc[1]))]
    rest = list(loc[2:])
    if rest[:1] == ["samples"] and len(rest) > 1:
        parts.append(f"sample {int(rest[1]) + 1}")
        rest = rest[2:]
    return ", ".join([*parts, ".".join(map(str, rest))] if rest else parts)


def _row_name(content: dict[str, Any], index: int) -> str:
    """A row by its number and, as far as it says so, its name. Nothing is known of its form."""
    row = content["rows"][index]
    found = []
    if isinstance(row, dict):
        workload = row.get("workload")
        about = workload if isinstance(workload, dict) else {}
        batch = ("batch", about["batch"]) if "batch" in about else ()
        found = [about.get("kind"), *batch, row.get("variant")]
    name = " ".join(str(part) for part in found if isinstance(part, str | int))
    return f"row {index + 1} ({escape(name, 80)})" if name else f"row {index + 1}"


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
