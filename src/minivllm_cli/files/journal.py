"""OUT.partial: every finished request on disk at once, so that an interrupted run loses nothing."""

import fcntl
import json
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from minivllm_cli.errors import CliError, OutputFailed
from minivllm_cli.files.fingerprint import changed_parts, fingerprint
from minivllm_engine.core.atomic_file import write_all
from minivllm_engine.protocol.records import record_failed
from minivllm_engine.protocol.strict_json import dump_line

_VERSION = 1
_HEADER_START = b'{"journal":'
_FSYNC_SECONDS = 2.0
_KEY_BITS = 64
_KEY_MASK = (1 << _KEY_BITS) - 1


class Journal:
    """The journal of one output file, open and locked. Records stay on disk; memory holds offsets only.

    Attributes:
        path: OUT.partial.
        num_resumed: usable lines that were there when it was opened.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.num_resumed = 0
        self._file = file
        self._ours = False
        # Of the last line of each request, by index: its offset, and below that the half of its key.
        self._lines: dict[int, int] = {}
        self._failed: set[int] = set()
        self._synced = time.monotonic()

    @classmethod
    def open(
        cls, path: Path, parts: dict[str, str], *, overwrite: bool = False, force: bool = False
    ) -> "Journal":
        """Open or create the journal and take its lock; read what an earlier run left.

        Args:
            parts: of the fingerprint.
            overwrite: start again whatever is there.
            force: go on although the fingerprint differs.

        Raises:
            CliError: another run holds it, it belongs to another run, is no journal, or cannot be written.
        """
        journal = cls(path, _open_locked(path))
        try:
            if overwrite:
                _refuse_foreign(path)
                journal._file.truncate(0)
            journal._read(parts, force)
        except BaseException:
            journal.close()
            raise
        return journal

    def is_done(self, index: int, key: str) -> bool:
        """Say whether this very request was answered. A failed one is to be tried again."""
        return self.has_answer(index) and self._lines[index] & _KEY_MASK == _short(key)

    def has_answer(self, index: int) -> bool:
        """Say whether this line was answered, be it as another request than it is now."""
        return index in self._lines and index not in self._failed

    @property
    def num_usable(self) -> int:
        """How many lines have an answer."""
        return len(self._lines) - len(self._failed)

    def append(self, index: int, key: str, record: dict[str, Any]) -> None:
        """Write a finished request's record. It is in the file when this returns.

        Raises:
            OutputFailed: the disk is full or refuses.
        """
        line = dump_line({"key": key, "index": index, "record": record})
        offset = self._file.tell()
        try:
            if os.fstat(self._file.fileno()).st_size != offset:
                raise self._meddled()
            write_all(self._file.fileno(), line)
            if time.monotonic() - self._synced >= _FSYNC_SECONDS:
                self.sync()
        except OSError as error:
            raise OutputFailed(
                f"cannot write {self.path}: {error.strerror or error}",
                why="what was written before is kept",
                hint="make room, then run the same command again",
            ) from None
        self._note(index, offset, key, record_failed(record))

    def record(self, index: int) -> dict[str, Any]:
        """Read back the last record of a request.

        Raises:
            OutputFailed: somebody else wrote to the file, and it is there no more.
        """
        try:
            entry = json.loads(self._line_at(self._lines[index] >> _KEY_BITS))
            record: dict[str, Any] = entry["record"]
            is_it = entry["index"] == index
        except (ValueError, KeyError, TypeError):
            is_it = False
        if not is_it:
            raise self._meddled()
        return record

    def _meddled(self) -> OutputFailed:
        return OutputFailed(
            f"{self.path} was changed by another process during the run",
            why="what is left in it is kept",
            hint="run the same command again, which answers what is missing",
        )

    def has_failed(self, index: int) -> bool:
        """Say whether the last record of this request is a failure."""
        return index in self._failed

    def completion_order(self, indices: Iterable[int]) -> list[int]:
        """Sort `indices` by the order in which their records were written."""
        return sorted(indices, key=self._lines.__getitem__)

    def sync(self) -> None:
        """Have the disk keep what was written."""
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def keep(self) -> None:
        """Have the disk keep the file, and write it again if somebody removed it: the run ends early.

        Raises:
            OutputFailed: another file is in its place; where the answers are.
        """
        path = self.path
        with suppress(OSError):  # a full disk was reported already
            self.sync()
            if self._is_in_place() or not self._lines:
                return
            if os.path.lexists(path):
                path = path.with_name(path.name + ".saved")
            with open(self._file.fileno(), "rb", closefd=False) as whole, open(path, "wb") as again:
                whole.seek(0)
                shutil.copyfileobj(whole, again)
        if path != self.path:
            raise OutputFailed(
                f"{self.path} was replaced by another process during the run",
                why=f"the answers are in {path}",
                hint=f"mv {path} {self.path}, then the same command again",
            )

    def remove(self) -> None:
        """Remove the journal, whose output is published, unless another file is in its place by now.

        Raises:
            OutputFailed: it cannot be removed.
        """
        try:
            if self._is_in_place():
                self.path.unlink()
        except OSError as error:
            raise OutputFailed(
                f"cannot remove {self.path}: {error.strerror or error}",
                why="the output is published, and whole",
                hint=f"rm {self.path}",
            ) from None
        self.close()

    def close(self) -> None:
        """Give up the lock. The file stays, unless there is no record in it."""
        if not self._file.closed:
            if not self._lines and self._ours and self._is_in_place():
                self.path.unlink()
            self._file.close()

    def _is_in_place(self) -> bool:
        return _still_there(self.path, self._file.fileno())

    def _read(self, parts: dict[str, str], force: bool) -> None:
        lines = _complete_lines(self.path)
        _, header = next(lines, (0, b""))
        if header or not _may_be_torn_header(self.path):
            theirs = _header_parts(header, self.path)
        self._ours = True
        end = len(header)
        for offset, line in lines:
            end = offset + len(line)
            self._replay(offset, line)
        if not self._lines:
            self._start(parts)
            return
        changed = changed_parts(parts, theirs)
        if changed and not force:
            raise CliError(
                f"{self.path} belongs to another run: {', '.join(changed)} changed",
                hint="--overwrite, or --resume force",
            )
        # A torn last line is dropped, or the next record would be glued to it.
        self._file.truncate(end)
        self._file.seek(end)

    def _replay(self, offset: int, line: bytes) -> None:
        try:
            entry = json.loads(line)
            index, key, failed = entry["index"], entry["key"], record_failed(entry["record"])
            if not isinstance(index, int) or index < 0 or isinstance(index, bool):
                return
            self._note(index, offset, key, failed)
        except (ValueError, KeyError, TypeError, RecursionError):
            # A damaged line is a request without an answer: it is run again.
            return
        self.num_resumed += 1

    def _start(self, parts: dict[str, str]) -> None:
        self._file.seek(0)
        self._file.truncate(0)
        header = {"journal": _VERSION, "fingerprint": fingerprint(parts), "parts": parts}
        try:
            write_all(self._file.fileno(), dump_line(header))
            self.sync()
        except OSError as error:
            raise CliError(
                f"cannot write {self.path}: {error.strerror or error}",
                hint="make room there, or another --output",
            ) from None

    def _note(self, index: int, offset: int, key: str, failed: bool) -> None:
        self._lines[index] = offset << _KEY_BITS | _short(key)
        (self._failed.add if failed else self._failed.discard)(index)

    def _line_at(self, offset: int) -> bytes:
        line, step = b"", 1 << 16
        while b"\n" not in line and (
            chunk := os.pread(self._file.fileno(), step, offset + len(line))
        ):
            line += chunk
        return line.partition(b"\n")[0]


def holds_records(path: Path) -> bool:
    """Say whether there is a journal with at least one record, be it a damaged one."""
    try:
        return len(list(islice(_complete_lines(path), 2))) == 2
    except OSError:
        return False


def _open_locked(path: Path) -> BinaryIO:
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise CliError(
            f"{path} is no regular file; the journal goes there",
            hint="move it away, or another --output",
        )
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise CliError(
                f"cannot write {path}: {error.strerror or error}",
                hint="--output FILE in a directory that can be written to",
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise CliError(
                f"{path} is being written by another run",
                hint="wait for it, or use another --output",
            ) from None
        # The run that held it may have published and removed the file in between.
        if _still_there(path, descriptor):
            return os.fdopen(descriptor, "r+b", buffering=0)
        os.close(descriptor)


def _still_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _complete_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Offset and content of every line that has its newline."""
    offset = 0
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield offset, line
            offset += len(line)


def _refuse_foreign(path: Path) -> None:
    _, header = next(_complete_lines(path), (0, b""))
    if header or not _may_be_torn_header(path):
        _header_parts(header, path)


def _may_be_torn_header(path: Path) -> bool:
    """Is a file without a whole line what a run leaves that was killed at once?"""
    with open(path, "rb") as file:
        start = file.read(len(_HEADER_START))
    return _HEADER_START.startswith(start)


def _header_parts(header: bytes, path: Path) -> dict[str, Any]:
    try:
        document = json.loads(header)
    except ValueError:
        document = None
    parts = document.get("parts") if isinstance(document, dict) else None
    if not isinstance(parts, dict) or document.get("journal") != _VERSION:
        raise CliError(
            f"{path} is not a journal of minivllm",
            why="a run would write its own there, and remove it at the end",
            hint=f"mv {path} elsewhere, then the same command again",
        )
    return parts


def _short(key: str) -> int:
    return int(key[:16], 16) & _KEY_MASK
