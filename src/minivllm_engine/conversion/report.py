"""What a conversion says while it runs, and afterwards."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class Progress:
    """Given to the callback at the start of a phase, and after every tensor or part of a large one.

    Attributes:
        phase: "compare" (is the head the embedding?), "resume" (shards already there are hashed),
            "write", "hash" (source files, for the manifest), "verify", and "check" in `check`.
        shard, num_shards: the file at hand, from 1, and how many the phase has.
        done_bytes, total_bytes: of the phase.
    """

    phase: Literal["compare", "resume", "write", "hash", "verify", "check"]
    shard: int
    num_shards: int
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Cast:
    """A cast that lost something, over all tensors of one pattern.

    Attributes:
        max_relative_error: max |after - before| / |before| over values whose |before| is not 0.
        worst: name of the target tensor that has it.
    """

    pattern: str
    before: str
    after: str
    max_relative_error: float
    worst: str


@dataclass(frozen=True, slots=True)
class ShardReport:
    """One file of the result. resumed: it was there already and its hash was right."""

    name: str
    num_bytes: int
    sha256: str
    resumed: bool


@dataclass(frozen=True, slots=True)
class Report:
    """A finished conversion.

    Attributes:
        dst: the directory, complete.
        verified: "none", "sample" or "full"; num_verified: source tensors compared.
        notes: what came to light while converting, beyond the notes of the plan.
    """

    dst: Path
    shards: tuple[ShardReport, ...]
    num_tensors: int
    bytes_out: int
    casts: tuple[Cast, ...]
    verified: str
    num_verified: int
    notes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as it should be.

    Attributes:
        kind: "hash" (a file is not the one the manifest names), "missing", "unexpected", "shape",
            "dtype", "value", "non_finite", "config", "side_file", "incomplete" (a tensor that is left
            out by `allow_missing`), "refused" (by the loader).
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
        "incomplete",
        "refused",
    ]
    name: str
    detail: str
