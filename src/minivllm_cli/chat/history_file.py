"""The file of what was typed: mode 0600, locked while it is written, in prompt_toolkit's own format."""

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from prompt_toolkit.history import History

_MOST_BYTES = (
    1 << 22
)  # of the file's end; what was typed longer ago stays there and is not looked at


class HistoryFile(History):
    """Texts typed in earlier chats. Several chats may append to one file.

    Args:
        warn: told once when the file cannot be used.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        super().__init__()
        self.path = path
        self._warn = warn
        self._usable = True

    def load_history_strings(self) -> Iterable[str]:
        """Return all texts, newest first; none where there is no file."""
        try:
            return reversed(self._read())
        except OSError as error:
            self._complain(error)
            return []

    def append_string(self, string: str) -> None:
        """Remember one text. One that begins with a space is not remembered."""
        if not string.startswith(" "):
            super().append_string(string)

    def store_string(self, string: str) -> None:
        """Append one text to the file."""
        entry = f"\n# {datetime.now()}\n" + "".join(f"+{line}\n" for line in string.split("\n"))
        try:
            with self._locked() as descriptor:
                os.write(descriptor, entry.encode("utf-8", "replace"))
        except OSError as error:
            self._complain(error)

    def clear(self) -> None:
        """Forget all texts, here and in the file.

        Raises:
            OSError: the file cannot be written.
        """
        with self._locked() as descriptor:
            os.ftruncate(descriptor, 0)
        self._loaded_strings = []

    def _read(self) -> list[str]:
        if not self.path.exists():
            return []
        texts: list[str] = []
        lines: list[str] = []
        with self.path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_BYTES))
            for raw in [*file, b"\n"]:
                line = raw.decode("utf-8", "replace")
                if line.startswith("+"):
                    lines.append(line[1:])
                elif lines:
                    texts.append("".join(lines)[:-1])
                    lines = []
        return texts

    @contextmanager
    def _locked(self) -> Iterator[int]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.fchmod(descriptor, 0o600)
            yield descriptor
        finally:
            os.close(descriptor)

    def _complain(self, error: OSError) -> None:
        if self._usable:
            self._usable = False
            self._warn(f"history is not kept: {self.path}: {error.strerror}")
