"""The input as lines with their numbers: read twice, never held in memory, stdin spooled to a file."""

import json
import os
import shlex
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from minivllm_cli.console.streams import Console
from minivllm_cli.errors import CliError

_BOM = b"\xef\xbb\xbf"
_COPY_BYTES = 1 << 20
_LARGEST_DOCUMENT = 1 << 26
_PROMPT_KEYS = {"prompt", "messages", "prompt_token_ids", "custom_id"}


class InputFile:
    """A file of prompts. Lines end at a newline and nowhere else.

    Attributes:
        name: as it stands in messages.
        path: the real file; None where it was spooled from stdin or a pipe.
        position: bytes read in this pass.
        num_blank: lines of this pass that were skipped because nothing is in them.
    """

    def __init__(self, name: str, file: BinaryIO, path: Path | None) -> None:
        self.name = name
        self.path = path
        self.position = self.num_blank = 0
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

    def check_is_lines(self) -> None:
        """Refuse one JSON document in the place of JSON lines. A single bad line is none.

        Raises:
            CliError: it is one; how to make lines of it.
        """
        lines = self.lines()
        first = next(lines, (0, b""))[1].decode("utf-8", "replace").strip()
        if not first.startswith("[") and first != "{":
            return
        if next(lines, None) is not None and _json_value(first) is not None:
            return
        kind = "array" if first.startswith("[") else "object"
        self._file.seek(0)
        value = _json_value(self._file.read(_LARGEST_DOCUMENT).decode("utf-8-sig", "replace"))
        if value is None:
            raise CliError(f"{self.name} begins as one JSON {kind}, and is not JSON lines")
        script = "'.[]'" if kind == "array" else "."
        if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
            script = "'.[] | {prompt: .}'"
        hint = f"jq -c {script} before the pipe"
        if self.path is not None:
            lines_name = self.path.with_name(f"{self.path.stem}-lines.jsonl")
            hint = f"jq -c {script} {shlex.quote(self.name)} > {shlex.quote(str(lines_name))}"
        raise CliError(f"{self.name} is one JSON {kind}, not JSON lines", hint=hint)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield (line number from 1, content without its newline) for every line that is not blank.

        What was appended since the file was opened is left out, so that both passes see the same.

        Raises:
            CliError: it cannot be read any more.
        """
        self._file.seek(0)
        self.position = self.num_blank = 0
        try:
            for number, line in enumerate(self._file, start=1):
                if self.position + len(line) > self.size:
                    return
                self.position += len(line)
                if number == 1:
                    line = line.removeprefix(_BOM)
                if line.strip():
                    yield number, line.removesuffix(b"\n").removesuffix(b"\r")
                else:
                    self.num_blank += 1
        except OSError as error:
            raise _unreadable(self.name, error) from None

    @property
    def size(self) -> int:
        """Bytes that the file had when it was opened."""
        return self._state[0]

    @property
    def changed(self) -> bool:
        """Was the file written to since it was opened?"""
        return self._stat() != self._state

    def same_file(self, path: Path) -> bool:
        """Say whether it is the file at `path`, by whatever name."""
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


def read_text(flag: str, value: str) -> str:
    """Return the text that an option means: itself, that of a file for @FILE, or all of stdin for "-".

    Line ends around what was read are dropped. "@@" begins a text with an @.

    Raises:
        CliError: the file cannot be read, or is not UTF-8.
    """
    if value == "-":
        return _decoded(flag, "stdin", b"" if sys.stdin is None else sys.stdin.buffer.read())
    if not value.startswith("@") or value.startswith("@@"):
        return value.removeprefix("@")
    name = value[1:]
    try:
        data = Path(os.path.expanduser(name)).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CliError(
            f"{flag} {value}: cannot read {name}: {reason}",
            hint=f"@{value} for a text that begins with @",
        ) from None
    return _decoded(flag, name, data)


def read_piped_text() -> str | None:
    """Return what a pipe on stdin holds, as one text; None where a terminal is, or nothing.

    Raises:
        CliError: it holds JSON lines, or is not UTF-8.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return None
    text = read_text("stdin", "-")
    document = _json_value(text.partition("\n")[0])
    if isinstance(document, dict) and not _PROMPT_KEYS.isdisjoint(document):
        raise CliError(
            "stdin holds JSON lines, which are read as such only if asked", hint="--input -"
        )
    return text or None


def _decoded(flag: str, name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig").strip("\r\n")
    except UnicodeDecodeError as error:
        place = f"byte 0x{data[error.start]:02x} at {error.start:,}"
        raise CliError(f"{flag}: {name} is not UTF-8 ({place})") from None


def _json_value(text: str) -> Any:
    """The JSON value that `text` begins with; None where it does not."""
    try:
        return json.JSONDecoder().raw_decode(text.lstrip())[0]
    except (ValueError, RecursionError):
        return None


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
