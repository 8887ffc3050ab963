"""The first pass over the input: what is in it, what is wrong with it, what is done already."""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from minivllm_cli.errors import CliError
from minivllm_engine.protocol.lines import BadLine, Line, RequestLine
from minivllm_engine.protocol.records import record_failed
from minivllm_engine.protocol.strict_json import BadJson, parse_object


@dataclass
class Selection:
    """The part of the input that was asked for. Without limits, all of it."""

    limit: int | None = None
    ids: frozenset[str] | None = None

    def pick(self, lines: Iterable[Line]) -> Iterator[Line]:
        """The selected lines, in order."""
        taken = 0
        for line in lines:
            if self.limit is not None and taken >= self.limit:
                return
            if self.ids is None or str(line.id) in self.ids:
                taken += 1
                yield line


@dataclass
class Scan:
    """Counts of one pass over the selected lines.

    Attributes:
        indices: of the selected lines, in input order.
        kinds: lines of each kind; "bad" are those that cannot be run.
        num_sequences: outputs asked for, `n` counted.
        num_own_max_tokens: lines with a max_tokens of their own, or one that is forced on them.
        num_done: answered by an earlier run.
        num_changed: answered by an earlier run, but as another request than it is now.
        num_failed_before: failed in an earlier run, to be tried again.
    """

    indices: "array[int]" = field(default_factory=lambda: array("q"))
    kinds: Counter[str] = field(default_factory=Counter)
    bad_codes: Counter[str] = field(default_factory=Counter)
    num_sequences: int = 0
    num_sequences_done: int = 0
    num_own_max_tokens: int = 0
    num_done: int = 0
    num_changed: int = 0
    num_failed_before: int = 0

    @property
    def total(self) -> int:
        """Selected lines, good and bad."""
        return len(self.indices)

    @property
    def num_bad(self) -> int:
        """Lines that cannot be run."""
        return self.kinds["bad"]

    @property
    def num_left(self) -> int:
        """Lines that the model has to answer."""
        return self.total - self.num_bad - self.num_done

    @property
    def counts_outputs(self) -> bool:
        """Do some lines ask for several outputs, so that these must be told from requests?"""
        return self.num_sequences != self.total

    def counted(self, done: int) -> str:
        """How many of the lines are done: "812/1000", with their unit where outputs are counted beside."""
        return f"{done}/{self.total}{' requests' if self.counts_outputs else ''}"

    def add(self, line: Line, *, done: bool, failed_before: bool) -> None:
        """Count one line."""
        self.indices.append(line.index)
        sequences = line.num_sequences if isinstance(line, RequestLine) else 1
        self.num_sequences += sequences
        if done:
            self.num_done += 1
            self.num_sequences_done += sequences
        elif failed_before:
            self.num_failed_before += 1
        if isinstance(line, BadLine):
            self.kinds["bad"] += 1
            self.bad_codes[line.code] += 1
        else:
            self.num_own_max_tokens += line.params.max_tokens is not None
            self.kinds["batch" if line.batch is not None else line.kind] += 1


def failed_ids(path: Path) -> frozenset[str]:
    """Ids of the failures in an earlier output.

    Raises:
        CliError: it cannot be read, or is no output of `generate`.
    """
    found: set[str] = set()
    number = 0
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                number += 1
                if line.strip():
                    record = parse_object(line)
                    if record_failed(record):
                        found.add(
                            str(record["custom_id"] if "response" in record else record["id"])
                        )
    except OSError as error:
        raise CliError(
            f"cannot read {path}: {error.strerror or error}",
            hint="--only-failed FILE, an earlier --output",
        ) from None
    except (BadJson, UnicodeDecodeError, KeyError, TypeError):
        raise CliError(f"{path}:{max(number, 1)}: not a record of minivllm generate") from None
    if not found:
        raise CliError(f"{path} has no failed records")
    return frozenset(found)
