"""Writing records: to a stream as they are ready, or to a journal that is published at the end."""

import os
import tempfile
from array import array
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from minivllm_cli.batch.flags import GenerateFlags, Order
from minivllm_cli.console.streams import Console, Results, claim_stdout, strip_controls
from minivllm_cli.errors import CliError, OutputFailed
from minivllm_cli.files.atomic_file import sync_directory
from minivllm_cli.files.journal import Journal
from minivllm_cli.files.output_target import OutputTarget
from minivllm_engine.protocol.records import record_texts
from minivllm_engine.protocol.strict_json import dump_line, encode_text

Render = Callable[[dict[str, Any]], bytes]
_NOWHERE = -1


class Sink(Protocol):
    """Takes each record once, in any order. `position` counts the requests of this run from 0."""

    def put(self, position: int, index: int, key: str, record: dict[str, Any]) -> None:
        """Write or keep one record. Raises OutputFailed or OutputClosed."""

    def finish(self) -> None:
        """All records are there: bring the output into its final form."""

    def stop(self) -> None:
        """The run ends early: keep what is there."""


class StreamSink:
    """Writes to something that only takes bytes, in input order or as records come.

    In input order a record waits for those before it. Waiting ones lie in a temporary file.
    """

    def __init__(self, write: Callable[[bytes], None], render: Render, *, in_order: bool) -> None:
        self._write = write
        self._render = render
        self._in_order = in_order
        self._next = 0
        self._spool = _temporary_file() if in_order else None
        self._offsets = array("q")
        self._lengths = array("q")

    def put(self, position: int, index: int, key: str, record: dict[str, Any]) -> None:
        """Write the record, or keep it until its turn."""
        data = self._render(record)
        if not self._in_order:
            self._write(data)
            return
        if position != self._next:
            self._keep(position, data)
            return
        # Counted before it is written: an interrupt in between must not write a record twice.
        self._next += 1
        self._write(data)
        while self._has(self._next):
            self._next += 1
            self._release(self._next - 1)

    def finish(self) -> None:
        """Nothing is left to do but to drop the temporary file."""
        if self._spool is not None:
            self._spool.close()

    def stop(self) -> None:
        """Write what is finished although something before it never will be."""
        if self._in_order:
            for position in range(self._next, len(self._offsets)):
                if self._has(position):
                    self._release(position)
        self.finish()

    def _keep(self, position: int, data: bytes) -> None:
        assert self._spool is not None
        missing = position + 1 - len(self._offsets)
        if missing > 0:
            self._offsets.extend([_NOWHERE] * missing)
            self._lengths.extend([0] * missing)
        self._offsets[position] = self._spool.seek(0, os.SEEK_END)
        self._lengths[position] = len(data)
        self._spool.write(data)

    def _has(self, position: int) -> bool:
        return position < len(self._offsets) and self._offsets[position] != _NOWHERE

    def _release(self, position: int) -> None:
        assert self._spool is not None
        self._spool.seek(self._offsets[position])
        self._write(self._spool.read(self._lengths[position]))


class FileSink:
    """Writes to the journal; `finish` publishes. `indices` are those of the run, in input order."""

    def __init__(
        self,
        target: OutputTarget,
        journal: Journal,
        render: Render,
        indices: Iterable[int],
        *,
        in_order: bool,
    ) -> None:
        self._target = target
        self._journal = journal
        self._render = render
        self._indices = indices
        self._in_order = in_order

    def put(self, position: int, index: int, key: str, record: dict[str, Any]) -> None:
        """Append the record to the journal."""
        self._journal.append(index, key, record)

    def stop(self) -> None:
        """The journal stays, for the next run."""
        self._journal.keep()
        self._journal.close()

    def finish(self) -> None:
        """Write the published file beside the output, move it there, remove the journal.

        Interrupted at any point it leaves the journal, or the finished output, or both.
        """
        path = self._target.path
        assert path is not None
        self._journal.sync()
        beside = self._target.publishing_path
        try:
            self._write(beside)
            os.replace(beside, path)
            sync_directory(path.parent)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise OutputFailed(
                f"cannot publish {path}: {error.strerror or error}",
                why=f"all records are in {self._journal.path}",
                hint="make room, then run the same command again",
            ) from None
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        self._journal.remove()

    def _write(self, beside: Path) -> None:
        order = self._indices if self._in_order else self._journal.completion_order(self._indices)
        with open(beside, "wb") as file:
            for index in order:
                file.write(self._render(self._journal.record(index)))
            file.flush()
            if self._target.mode is not None:
                os.fchmod(file.fileno(), self._target.mode)
            os.fsync(file.fileno())


def _temporary_file() -> BinaryIO:
    return tempfile.TemporaryFile(prefix="minivllm-output-")


def open_sink(
    target: OutputTarget,
    flags: GenerateFlags,
    journal: Journal | None,
    indices: Iterable[int],
    console: Console,
    stack: ExitStack,
) -> Sink:
    """The sink of a checked target. Opening a FIFO waits for its reader.

    Where stdout is a terminal, `console` may have a bar on it.

    Raises:
        CliError: the device cannot be opened.
        OutputClosed: stdout was closed before we started.
    """
    render = _renderer(flags, str)
    in_order = flags.order is not Order.COMPLETION
    if journal is not None:
        return FileSink(target, journal, render, indices, in_order=in_order)
    if target.path is None:
        results = claim_stdout()
        if not results.is_terminal:
            return StreamSink(results.write, render, in_order=in_order)

        def write_beside_bar(data: bytes) -> None:
            console.remove_bar()
            results.write(data)

        render = _renderer(flags, strip_controls)
        return StreamSink(write_beside_bar, render, in_order=in_order)
    try:
        file = open(target.path, "wb", buffering=0)  # noqa: SIM115  (closed by the stack)
    except OSError as error:
        raise CliError(
            f"cannot write {target.path}: {error.strerror or error}", hint="another --output"
        ) from None
    stack.callback(file.close)
    return StreamSink(Results(file, str(target.path)).write, render, in_order=in_order)


def _renderer(flags: GenerateFlags, clean: Callable[[str], str]) -> Render:
    if not flags.writes_text:
        return dump_line
    separator = flags.separator_bytes
    return lambda record: b"".join(encode_text(clean(t)) + separator for t in record_texts(record))
