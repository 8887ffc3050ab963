"""What a conversion says while it runs and afterwards: progress, results, errors of the system."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from minivllm_engine.core.errors import CheckpointError, ConversionError


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
            out by `allow_missing`), "refused" (by the loader), "source" (a file of the source whose
            records are not what their checksums say).
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
        "source",
    ]
    name: str
    detail: str


Phase = Literal["compare", "resume", "write", "hash", "verify", "check"]
Callback = Callable[[Progress], None]


class Counter:
    """Adds up the bytes of one phase and tells the callback, if there is one; also at its start.

    Args:
        num_shards: files of the phase.
        total_bytes: of the phase; with none there is nothing to tell.
    """

    def __init__(
        self, callback: Callback | None, phase: Phase, num_shards: int, total_bytes: int
    ) -> None:
        self._callback = callback
        self._phase: Phase = phase
        self._num_shards = num_shards
        self._total = total_bytes
        self._done = 0
        self._shard = 1
        if total_bytes:
            self.advance(0)

    def enter_shard(self, number: int) -> None:
        """Begin shard `number`, counted from 1."""
        self._shard = number

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._callback:
            self._callback(
                Progress(self._phase, self._shard, self._num_shards, self._done, self._total)
            )


@contextmanager
def reading_errors() -> Iterator[None]:
    """Turn errors of reading into ours; also a decorator.

    Raises:
        CheckpointError: in the place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{_file_of(error)} cannot be read",
            why=error.strerror or str(error),
            hint="See that it is there and that you may read it.",
        ) from None


@contextmanager
def destination_errors() -> Iterator[None]:
    """Turn errors of looking at a destination, or changing it, into ours; also a decorator.

    Raises:
        ConversionError: "destination", in the place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise ConversionError(
            f"{_file_of(error)} cannot be looked at or replaced",
            why=error.strerror or str(error),
            hint="Give a directory in a place where you may read and write.",
            code="destination",
        ) from None


def _file_of(error: OSError) -> str:
    return "a file" if error.filename is None else str(error.filename)
