"""The input as lines with their numbers: read twice, never held in memory, stdin spooled to a file."""

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from minivllm_cli.console.streams import Console
from minivllm_cli.errors import CliError

_BOM = b"\xef\xbb\xbf"
_COPY_BYTES = 1 << 20


class InputFile:
    """A file of prompts. Lines end at a newline and nowhere else.

    Attributes:
        name: as it stands in messages.
        path: the real file; None where it was spooled from stdin or a pipe.
        position: bytes read in this pass.
    """

    def __init__(self, name: str, file: BinaryIO, path: Path | None) -> None:
        self.name = name
        self.path = path
        self.position = 0
        self._file = file
        self._state = self._stat()

    @classmethod
    def open(cls, source: str, console: Console) -> "InputFile":
        """Open a path, or stdin for "-". What cannot be read twice is copied to a temporary file.

        Raises:
            CliError: it cannot be read.
        """
        if source == "-":
            if sys.stdin is not None and sys.stdin.isatty():
                console.note(
                    "reading prompts from the terminal, one JSON object a line; Ctrl-D ends"
                )
            with open(0, "rb", closefd=False) as stdin:
                return cls("stdin", _spool(stdin, "stdin"), None)
        try:
            # A FIFO without a writer would block here, which is what whoever names one wants.
            file = open(source, "rb")  # noqa: SIM115  (kept open for two passes)
        except OSError as error:
            raise _unreadable(source, error) from None
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return cls(source, file, Path(source))
        with file:
            return cls(source, _spool(file, source), None)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(line number from 1, content without its newline) for every line that is not blank.

        What was appended since the file was opened is left out, so that both passes see the same.
        """
        self._file.seek(0)
        self.position = 0
        for number, line in enumerate(self._file, start=1):
            if self.position + len(line) > self.size:
                break
            self.position += len(line)
            if number == 1:
                line = line.removeprefix(_BOM)
            if line.strip():
                yield number, line.removesuffix(b"\n").removesuffix(b"\r")

    @property
    def size(self) -> int:
        """Bytes that the file had when it was opened."""
        return self._state[0]

    @property
    def changed(self) -> bool:
        """Was the file written to since it was opened?"""
        return self._stat() != self._state

    def count_blank_lines(self) -> int:
        """How many lines were skipped because nothing is in them."""
        total = 0
        blank = 0
        self._file.seek(0)
        for line in self._file:
            total += len(line)
            if total > self.size:
                break
            blank += not line.removeprefix(_BOM).strip()
        return blank

    def same_file(self, path: Path) -> bool:
        """Is it the file at `path`, by whatever name?"""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(path))
        except OSError:
            return False

    def close(self) -> None:
        """Close the file; a spooled copy disappears."""
        self._file.close()

    def _stat(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns


def _unreadable(name: str, error: OSError) -> CliError:
    reason = error.strerror or error
    return CliError(f"cannot read input {name}: {reason}", hint="--input FILE, or - for stdin")


def _spool(source: BinaryIO, name: str) -> BinaryIO:
    copy = tempfile.TemporaryFile(prefix="minivllm-input-")  # noqa: SIM115  (lives with InputFile)
    try:
        while chunk := source.read(_COPY_BYTES):
            copy.write(chunk)
        copy.flush()
    except OSError as error:
        raise _unreadable(name, error) from None
    return copy
