"""A transcript that is written while the chat goes on, so that even a kill loses no finished turn.

The file only ever grows: what is undone stays readable, followed by an event that takes it back.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from minivllm_cli.chat.saved_chat import (
    SavedChat,
    header_row,
    load_lines,
    message_row,
    message_rows,
)
from minivllm_cli.errors import CliError
from minivllm_engine.protocol.strict_json import dump_line


class TranscriptFile:
    """Owns the open file and knows which chat it describes.

    Raises:
        CliError (constructor): the file exists and `resume` is not set, another chat writes to it,
            it is no saved chat, or it cannot be opened.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self._written: SavedChat | None = None
        self._is_ours = not path.exists()
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise CliError(f"{path} cannot be opened", why=error.strerror or str(error)) from None
        try:
            self._lock_and_read(resume)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _lock_and_read(self, resume: bool) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CliError(f"another chat writes to {self.path}", hint="another name") from None
        size = os.fstat(self._descriptor).st_size
        if size and not resume:
            raise CliError(f"{self.path} exists", hint="--resume to go on with it, or another name")
        if size:
            chat, whole = load_lines(os.pread(self._descriptor, size, 0), str(self.path))
            os.ftruncate(self._descriptor, whole)
            self._written = chat

    @property
    def resumed(self) -> SavedChat | None:
        """The chat that the file holds so far; None when the file is new."""
        return self._written

    def update(self, chat: SavedChat) -> None:
        """Append what turns the chat in the file into `chat`; nothing where they are equal.

        Raises:
            CliError: the file cannot be written. The next update tries again.
        """
        data = b"".join(dump_line(row) for row in _difference(self._written, chat))
        size = os.fstat(self._descriptor).st_size
        try:
            _write_all(self._descriptor, data)
        except OSError as error:
            with suppress(OSError):  # a FIFO or a device has no size
                os.ftruncate(self._descriptor, size)
            raise CliError(
                f"{self.path} cannot be written", why=error.strerror or str(error)
            ) from None
        self._written = chat

    def close(self) -> None:
        """Let go of the file. One that we made and never wrote to is removed."""
        if self._is_ours and self._written is None:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def _difference(old: SavedChat | None, new: SavedChat) -> list[dict[str, Any]]:
    if old is None:
        return [header_row(new), *message_rows(new.transcript)]
    rows: list[dict[str, Any]] = []
    if old.settings != new.settings:
        rows.append({"event": "settings", "settings": dict(new.settings)})
    common = old.transcript.num_common(new.transcript)
    if common < len(old.transcript.messages):
        rows.append({"event": "truncate", "messages": common})
    if old.transcript.system != new.transcript.system:
        rows.append({"event": "system", "content": new.transcript.system})
    return rows + [message_row(message) for message in new.transcript.messages[common:]]


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
