"""Writing bytes whole: a small file at once or not at all, without harm to what is no regular file."""

import os
import stat
import tempfile
from pathlib import Path


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path`. A file is replaced and keeps its mode; behind a link, the one it leads to.

    What is no regular file (a FIFO, a device) is written to as it is: it must never be renamed over.

    Raises:
        OSError: it cannot be written; a file that was there is unchanged.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        found = None
    if found is not None and not stat.S_ISREG(found.st_mode):
        with open(path, "wb", buffering=0) as file:
            write_all(file.fileno(), data)
        return
    target = Path(os.path.realpath(path))
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            write_all(file.fileno(), data)
            os.fchmod(file.fileno(), _usual_mode() if found is None else found.st_mode & 0o777)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`, however little the system takes at a time.

    Raises:
        OSError: it cannot be written.
    """
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def sync_directory(path: Path) -> None:
    """Have the disk keep which files are in a directory.

    Raises:
        OSError: the disk refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _usual_mode() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
