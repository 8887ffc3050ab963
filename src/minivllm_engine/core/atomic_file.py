"""Files that are there whole or not at all, without harm to what is no regular file."""

import io
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomic(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write `data` to `path`. A file is replaced and keeps its mode; behind a link, the one it leads to.

    What is no regular file (a FIFO, a device) is written to as it is: it must never be renamed over.

    Args:
        durable: there, or as it was, after a power cut too.

    Raises:
        OSError: it cannot be written; a file that was there is unchanged.
    """
    try:
        special = not stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        special = False
    if special:
        with open(path, "wb", buffering=0) as file:
            write_all(file.fileno(), data)
        return
    with replacing(path, durable=durable) as file:
        write_all(file.fileno(), data)


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[io.FileIO]:
    """Open a file beside `path` that takes its place when the block ends, and is gone if the block fails.

    What a kill leaves of it is called `.NAME.*.tmp`.
    """
    try:
        mode = os.stat(path).st_mode & 0o777
    except FileNotFoundError:
        mode = _usual_mode()
    target = Path(os.path.realpath(path))
    descriptor, temporary = tempfile.mkstemp(
        dir=target.parent, prefix=f".{target.name}.", suffix=".tmp"
    )
    try:
        with io.FileIO(descriptor, "wb") as file:
            yield file
            os.fchmod(descriptor, mode)
            if durable:
                os.fsync(descriptor)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    if durable:
        sync_directory(target.parent)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`, of which one call may take a part only.

    Raises:
        OSError: it cannot be written.
    """
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def sync_directory(path: Path) -> None:
    """Force the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _usual_mode() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
