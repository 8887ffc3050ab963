"""The header of a safetensors file, read without a library so that a broken file gives a clear error.

Format (https://github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON object
`name -> {dtype, shape, data_offsets}`, then the data; offsets count from the end of the header.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape

_MAX_HEADER_BYTES = 100_000_000
# Of a dimension and an offset, which readers keep in 64 bits.
_LIMIT = 1 << 63
_COPY_AGAIN = "Copy the file again from where the model came from."

# The start of the small text that stands for a large file where Git LFS has not fetched it.
LFS_POINTER = b"version https://git-lfs"

# Bytes of one element of the types that can be loaded.
FLOAT_TYPES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `name` inside `file`, its data from byte `begin` to `end` of the file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def read_header(file: Path) -> list[TensorEntry]:
    """Read all tensors of `file`, in the order of its header.

    Raises:
        CheckpointError: the file cannot be read, is truncated, or its header is not one.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(len(LFS_POINTER))
            stream.seek(0)
            if start == LFS_POINTER:
                raise git_lfs_pointer(file)
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            _check_length(file, size, length)
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read",
            why=error.strerror or str(error),
            hint="See that it is there and that you may read it.",
        ) from None
    try:
        header = json.loads(raw.decode())
    except (ValueError, RecursionError):
        raise _no_safetensors(file, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise _no_safetensors(file, "its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _no_safetensors(file, "its __metadata__ is not an object of texts")
    data_begin = 8 + length
    entries = [_entry(file, name, fields, data_begin) for name, fields in header.items()]
    _check_coverage(file, entries, data_begin, size)
    return entries


def _check_coverage(file: Path, entries: list[TensorEntry], data_begin: int, size: int) -> None:
    """Tensors must cover the data once and whole: the format allows no holes and no overlaps."""
    at = data_begin
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != at:
            kind = "overlaps the one before it" if entry.begin < at else "leaves a hole before it"
            raise _no_safetensors(file, f"tensor {escape(repr(entry.name))} {kind}")
        at = entry.end
    if size < at:
        raise _truncated(file, f"it has {size:,} bytes, its header asks for {at:,}")
    if size > at:
        raise _no_safetensors(file, f"{size - at:,} bytes follow its last tensor")


def _check_length(file: Path, size: int, length: int) -> None:
    if size < 8:
        raise _truncated(file, f"it has {size} bytes, too few for a header")
    if length > _MAX_HEADER_BYTES or length < 2:
        raise _no_safetensors(file, f"a header of {length:,} bytes is impossible")
    if 8 + length > size:
        raise _truncated(file, f"it has {size:,} bytes, its header alone asks for {8 + length:,}")


def _entry(file: Path, name: str, fields: Any, data_begin: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        numbers = [begin, end, *shape]
        valid = isinstance(dtype, str) and isinstance(fields["shape"], list)
        valid = valid and all(type(number) is int and 0 <= number < _LIMIT for number in numbers)
        valid = valid and begin <= end
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise _no_safetensors(
            file, f"its header says {escape(repr(fields))} of tensor {escape(repr(name))}"
        )
    width = FLOAT_TYPES.get(dtype)
    if width is not None and math.prod(shape) * width != end - begin:
        raise _no_safetensors(
            file,
            f"tensor {escape(repr(name))} has {end - begin:,} bytes, "
            f"which is not {dtype} of shape {escape(list(shape))}",
        )
    return TensorEntry(file, name, dtype, shape, data_begin + begin, data_begin + end)


def git_lfs_pointer(file: Path) -> CheckpointError:
    return CheckpointError(
        f"{file} is not a safetensors file"
        if file.suffix == ".safetensors"
        else f"{file} is not there in full",
        why="it is a Git LFS pointer: the text that stands for a file that was not fetched",
        hint="git lfs pull",
    )


def _no_safetensors(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file} is not a safetensors file", why=why, hint=_COPY_AGAIN)


def _truncated(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file} is truncated", why=why, hint=_COPY_AGAIN)
