"""Comparing a finished conversion with its source."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from minivllm_engine.conversion.report import Progress
from minivllm_engine.conversion.source import Source


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as it should be.

    Attributes:
        kind: "hash" (a file is not the one the manifest names), "missing", "unexpected", "shape",
            "dtype", "value", "non_finite", "config", "side_file".
        name: of the tensor (as in the source, where it has one) or file.
        detail: figures.
    """

    kind: Literal[
        "hash",
        "missing",
        "unexpected",
        "shape",
        "dtype",
        "value",
        "non_finite",
        "config",
        "side_file",
    ]
    name: str
    detail: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `check` compared, and found."""

    num_shards: int
    num_tensors: int
    num_bytes: int
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "kind": "convert-check",
            "shards": self.num_shards,
            "tensors": self.num_tensors,
            "bytes": self.num_bytes,
            "differences": [
                {"kind": d.kind, "name": d.name, "detail": d.detail} for d in self.differences
            ],
            "ok": self.ok,
        }


def check(
    source: Source, dst: str | Path, *, progress: Callable[[Progress], None] | None = None
) -> CheckReport:
    """Read `dst` again, verify its hashes, invert the mapping and compare with `source`; scan values.

    The options of the conversion are taken from the manifest in `dst`. Writes nothing.

    Raises:
        CheckpointError: `dst` has no manifest, or the source cannot be read.
        ConversionError: code "not_covered": the source no longer has a plan without problems.
    """
    raise NotImplementedError
