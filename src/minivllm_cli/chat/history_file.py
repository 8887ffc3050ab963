"""The file of what was typed: mode 0600, locked while it is written, in prompt_toolkit's own format."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path


class HistoryFile:
    """Texts typed in earlier chats, oldest first.

    Several chats may append to one file. Every method raises OSError where the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[str]:
        """All texts, oldest first; none where there is no file."""
        if not self.path.exists():
            return []
        texts: list[str] = []
        lines: list[str] = []
        with self.path.open("rb") as file:
            for raw in [*file, b"\n"]:
                line = raw.decode("utf-8", "replace")
                if line.startswith("+"):
                    lines.append(line[1:])
                elif lines:
                    texts.append("".join(lines)[:-1])
                    lines = []
        return texts

    def append(self, text: str) -> None:
        """Store one text. One that begins with a space is not stored."""
        if text.startswith(" "):
            return
        entry = f"\n# {datetime.now()}\n" + "".join(f"+{line}\n" for line in text.split("\n"))
        with self._locked() as descriptor:
            os.write(descriptor, entry.encode("utf-8", "replace"))

    def clear(self) -> None:
        """Forget all texts."""
        with self._locked() as descriptor:
            os.ftruncate(descriptor, 0)

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
