"""Files that are there whole or not at all, also after a power cut."""

import json
import os
from pathlib import Path
from typing import Any


def write_durably(file: Path, content: bytes) -> None:
    """Write under a temporary name, force to the disk, rename."""
    temporary = file.with_name(file.name + ".tmp")
    with temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)
    sync_directory(file.parent)


def write_json(file: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # A path need not be UTF-8; what Python has for its bytes is escaped as JSON has it: \udcff.
    write_durably(file, text.encode("utf-8", "backslashreplace"))


def sync_directory(path: Path) -> None:
    """Force the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
