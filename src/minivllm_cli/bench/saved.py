"""What `--save` wrote, read back for a comparison. Nothing in it is trusted."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, Field, TypeAdapter, ValidationError

from minivllm_cli.bench.flags import Metric
from minivllm_cli.bench.workload import IDENTITY, workload_title
from minivllm_cli.errors import CliError
from minivllm_engine.core.escape import escape
from minivllm_engine.protocol.strict_json import BadJson, parse_object

_MOST_BYTES = 64 << 20


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("holds control characters")
    return text


# No quotient of two of these is infinite.
_Finite = Annotated[float, Field(strict=True, ge=0, le=1e18)]
_Positive = Annotated[float, Field(strict=True, ge=1e-18, le=1e18)]
_Count = Annotated[int, Field(strict=True, ge=0, le=10**18)]
_Name = Annotated[str, Field(strict=True, max_length=1000), AfterValidator(_printable)]


def _workload(values: dict[str, Any]) -> dict[str, Any]:
    """What tells rows apart has to be there."""
    kind = values.get("kind")
    if kind not in IDENTITY:
        raise ValueError(f"kind {escape(kind, 40)} is none of {', '.join(IDENTITY)}")
    missing = [key for key in ("batch", *IDENTITY[str(kind)]) if key not in values]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    if not isinstance(values["batch"], int):
        raise ValueError("batch is no number")
    return values


_Workload = Annotated[dict[_Name, _Count | _Name], AfterValidator(_workload)]


@dataclass(frozen=True, slots=True)
class SavedSample:
    """What `--metric` knows of a sample; None where the workload has none."""

    tok_s: _Positive
    wall_s: _Positive
    itl_ms: _Finite | None
    ttft_ms: _Finite | None
    queue_ms: _Finite | None
    tpot_ms: _Finite | None
    e2e_ms: _Finite | None


@dataclass(frozen=True, slots=True)
class SavedRow:
    """A variant of a workload."""

    workload: _Workload
    # Files of version 0.1.0 called it an arm.
    variant: Annotated[_Name, Field(validation_alias=AliasChoices("variant", "arm"))]
    samples: Annotated[list[SavedSample], Field(min_length=1, max_length=100_000)]

    @property
    def key(self) -> str:
        """The same for the same row of another run."""
        return json.dumps([self.workload, self.variant], sort_keys=True)

    @property
    def title(self) -> str:
        """A row in a message: "decode · depth 4 · gen 8 · batch 1 · graph"."""
        return f"{workload_title(self.workload)} · batch {self.workload['batch']} · {self.variant}"

    def values(self, metric: Metric) -> list[float]:
        """List that metric of the samples that have it."""
        return [v for one in self.samples if (v := getattr(one, metric)) is not None]


@dataclass(frozen=True, slots=True)
class SavedModel:
    """Which model it was."""

    name: _Name
    hash: _Name


@dataclass(frozen=True, slots=True)
class SavedDevice:
    """Where it ran."""

    kind: _Name
    name: _Name


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A document of `bench`, as far as a comparison reads it."""

    kind: Literal["bench"]
    schema_version: Literal[1]
    complete: bool
    env: dict[_Name, Any]
    config: dict[_Name, Any]
    model: SavedModel
    device: SavedDevice
    rows: Annotated[list[SavedRow], Field(min_length=1, max_length=10_000)]


_RUN = TypeAdapter(SavedRun)


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
        run = _RUN.validate_python(parse_object(data.decode("utf-8")))
        _check_rows(run.rows)
    except UnicodeDecodeError:
        raise CliError(f"{path} is no saved run", why="it is not UTF-8", hint=hint) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        why = escape(f"{place}: {first['msg'].removeprefix('Value error, ')}", 300)
        raise CliError(f"{path} is no saved run", why=why, hint=hint) from None
    except BadJson as error:
        raise CliError(f"{path} is no saved run", why=error.message, hint=hint) from None
    return run


def _check_rows(rows: list[SavedRow]) -> None:
    seen: dict[str, int] = {}
    for number, row in enumerate(rows):
        earlier = seen.setdefault(row.key, number)
        if earlier != number:
            raise BadJson(f"rows.{number}: {row.title} is there twice, as rows.{earlier} too")
