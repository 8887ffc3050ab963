"""SHA-256 of files, read in blocks."""

import hashlib
from collections.abc import Callable
from pathlib import Path

_BLOCK = 1 << 22


def sha256_of(file: Path, advance: Callable[[int], None] | None = None) -> str:
    """The hash in hexadecimal. advance: called with the bytes of each block that was read."""
    digest = hashlib.sha256()
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(view[:count])
            if advance:
                advance(count)
    return digest.hexdigest()
