"""Writing records: to a stream as they are ready, or to a journal that is published at the end."""

import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from minivllm_cli.batch.flags import GenerateFlags, Order
from minivllm_cli.console.streams import Console, Results, claim_stdout, strip_controls
from minivllm_cli.errors import CliError, OutputFailed
from minivllm_cli.files.journal import Journal
from minivllm_cli.files.output_target import OutputTarget
from minivllm_engine.core.atomic_file import sync_directory
from minivllm_engine.protocol.records import record_texts
from minivllm_engine.protocol.strict_json import dump_line, encode_text

Render = Callable[[dict[str, Any]], bytes]


class Sink(Protocol):
    """Takes each record once, in any order. `position` counts the requests of this run from 0."""

    def put(self, position: int, index: int, key: str, record: dict[str, Any]) -> None:
        """Write or keep one record. Raises OutputFailed or OutputClosed."""

    def finish(self) -> None:
        """Bring the output into its final form: all records are there."""

    def stop(self) -> None:
        """Keep what is there: the run ends early."""


@dataclass
class StreamSink:
    """Writes to something that only takes bytes, in input order or as records come.

    In input order a record waits for those before it. Waiting ones lie in a temporary file.
    """

    write: Callable[[bytes], None]
    render: Render
    in_order: bool
    _next: int = 0
    _spool: BinaryIO | None = None
    _kept: dict[int, tuple[int, int]] = field(default_factory=dict)

    def put(self, position: int, index: int, key: str, record: dict[str, Any]) -> None:
        """Write the record, or keep it until its turn."""
        data = self.render(record)
        if not self.in_order:
            self.write(data)
            return
        if position != self._next:
            self._keep(position, data)
            return
        # Counted before it is written: an interrupt in between must not write a record twice.
        self._next += 1
        self.write(data)
        while self._next in self._kept:
            self._next += 1
            self._release(self._next - 1)

    def finish(self) -> None:
        """Drop the temporary file; nothing else is left to do."""
        if self._spool is not None:
            self._spool.close()

    def stop(self) -> None:
        """Write what is finished although something before it never will be."""
        for position in sorted(self._kept):
            self._release(position)
        self.finish()

    def _keep(self, position: int, data: bytes) -> None:
        try:
            if self._spool is None:
                self._spool = tempfile.TemporaryFile(prefix="minivllm-output-")  # noqa: SIM115
            offset = self._spool.seek(0, os.SEEK_END)
            self._spool.write(data)
            self._spool.flush()
        except OSError as error:
            raise OutputFailed(
                f"cannot keep what waits for its turn: {error.strerror or error}",
                why=f"it is kept in {tempfile.gettempdir()}",
                hint="--output FILE, or --order completion",
            ) from None
        self._kept[position] = (offset, len(data))

    def _release(self, position: int) -> None:
        assert self._spool is not None
        offset, length = self._kept.pop(position)
        self._spool.seek(offset)
        self.write(self._spool.read(length))


@dataclass
class FileSink:
    """Writes to the journal; `finish` publishes. `indices` are those of the run, in input order."""

    target: OutputTarget
    journal: Journal
    render: Render
    indices: Iterable[int]
    in_order: bool

    def put(self, position: int, index: int, key: str, record: dict[str, Any]) -> None:
        """Append the record to the journal."""
        self.journal.append(index, key, record)

    def stop(self) -> None:
        """Leave the journal for the next run."""
        self.journal.keep()
        self.journal.close()

    def finish(self) -> None:
        """Write the published file beside the output, move it there, remove the journal.

        Interrupted at any point it leaves the journal, or the finished output, or both.
        """
        path = self.target.path
        assert path is not None
        self.journal.sync()
        beside = self.target.publishing_path
        try:
            self._write(beside)
            os.replace(beside, path)
            sync_directory(path.parent)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise OutputFailed(
                f"cannot publish {path}: {error.strerror or error}",
                why=f"all records are in {self.journal.path}",
                hint="make room, then run the same command again",
            ) from None
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        self.journal.remove()

    def _write(self, beside: Path) -> None:
        order = self.indices if self.in_order else self.journal.completion_order(self.indices)
        with open(beside, "wb") as file:
            for index in order:
                file.write(self.render(self.journal.record(index)))
            file.flush()
            if self.target.mode is not None:
                os.fchmod(file.fileno(), self.target.mode)
            os.fsync(file.fileno())


def open_sink(
    target: OutputTarget,
    flags: GenerateFlags,
    journal: Journal | None,
    indices: Iterable[int],
    console: Console,
    stack: ExitStack,
) -> Sink:
    """Open the sink of a checked target. Opening a FIFO waits for its reader.

    Where stdout is a terminal, `console` may have a bar on it.

    Raises:
        CliError: the device cannot be opened.
        OutputClosed: stdout was closed before we started.
    """
    render = _renderer(flags, str)
    in_order = flags.order is not Order.COMPLETION
    if journal is not None:
        return FileSink(target, journal, render, indices, in_order)
    if target.path is None:
        results = claim_stdout()
        if not results.is_terminal:
            return StreamSink(results.write, render, in_order)

        def write_beside_bar(data: bytes) -> None:
            console.remove_bar()
            results.write(data)

        render = _renderer(flags, strip_controls)
        return StreamSink(write_beside_bar, render, in_order)
    try:
        file = open(target.path, "wb", buffering=0)  # noqa: SIM115  (closed by the stack)
    except OSError as error:
        raise CliError(
            f"cannot write {target.path}: {error.strerror or error}", hint="another --output"
        ) from None
    stack.callback(file.close)
    return StreamSink(Results(file, str(target.path)).write, render, in_order)


def _renderer(flags: GenerateFlags, clean: Callable[[str], str]) -> Render:
    if not flags.writes_text:
        return dump_line
    separator = flags.separator_bytes
    return lambda record: b"".join(encode_text(clean(t)) + separator for t in record_texts(record))
