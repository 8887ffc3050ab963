"""The archives that torch.save writes: mapped, never unpickled beyond tensors. Loads torch."""

import pickle
import pickletools
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from minivllm_engine.checkpoint.safetensors_header import LFS_POINTER, git_lfs_pointer
from minivllm_engine.conversion.report import reading_errors
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape

FLAT = "Save the weights alone, in one flat dictionary: torch.save(model.state_dict(), FILE)."
# Bytes of a pickle that describes 100,000 tensors; more cost time and memory and are no model.
_LONGEST_PICKLE = 16 << 20
_BLOCK = 1 << 20
# Parts of a tuple, those of its parts counted where they stand: hashing one looks at each of them.
_LARGEST_TUPLE = 1 << 16


def load_archive(file: Path) -> Any:
    """Map what torch.save has written; no tensor data is read.

    Raises:
        CheckpointError: the file is broken, or holds more than tensors.
    """
    with reading_errors(), file.open("rb") as stream:
        start = stream.read(len(LFS_POINTER))
    if start == LFS_POINTER:
        raise git_lfs_pointer(file)
    if start[:2] != b"PK":
        raise CheckpointError(
            f"{file} is not a file of torch.save",
            why=f"it has {file.stat().st_size:,} bytes and does not start as one",
            hint="Copy the file again; one from before torch 1.6 is to be saved again.",
        )
    _check_archive(file)
    try:
        with warnings.catch_warnings():
            # What torch says of its own classes while it rebuilds them; what is wrong is said here.
            warnings.simplefilter("ignore")
            return torch.load(file, weights_only=True, mmap=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} holds Python objects beside tensors, which are never loaded",
            why=_object_named_in(str(error)),
            hint=FLAT,
        ) from None
    except Exception as error:
        # Whatever torch and its reader of pickles stumble over lies in the file.
        raise _broken(file, str(error).split("\n")[0] or type(error).__name__) from None


def _broken(file: Path, why: str) -> CheckpointError:
    hint = "Copy the file again from where it came from."
    return CheckpointError(f"{file} is truncated or broken", why=escape(why), hint=hint)


def _check_archive(file: Path) -> None:
    """Refuse an archive whose records do not lie there as they are: they are mapped, not read."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            _check_records(file, records)
            for record in records:
                if record.filename.endswith("data.pkl"):
                    with warnings.catch_warnings():
                        warnings.simplefilter(
                            "ignore"
                        )  # of escapes in strings, which are not read here
                        _check_tuples(file, archive.read(record))
    except (
        zipfile.BadZipFile,
        ValueError,
        NotImplementedError,
        struct.error,
        EOFError,
        RuntimeError,
        OSError,  # a place before the file begins
    ) as error:
        raise _broken(file, str(error) or type(error).__name__) from None


def _check_records(file: Path, records: list[zipfile.ZipInfo]) -> None:
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
            raise CheckpointError(
                f"{file} holds a compressed or encrypted record: {escape(record.filename)}",
                why="torch.save writes none, and what lies there are not the numbers of a tensor",
                hint="Save it again: torch.save(torch.load(FILE, weights_only=True, mmap=False), NEW).",
            )
        if record.filename.endswith("data.pkl") and record.file_size > _LONGEST_PICKLE:
            raise CheckpointError(
                f"{file} describes its tensors in {record.file_size:,} bytes",
                why=f"more than {_LONGEST_PICKLE:,} stand for no model",
                hint=FLAT,
            )


def _check_tuples(file: Path, content: bytes) -> None:
    """Refuse tuples that hold themselves over and over: as a key, one of forty levels is hashed for years."""
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    last = 1
    for op, argument, _ in pickletools.genops(content):
        if op.name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo.get(int(argument or 0), 1))
            continue
        if op.name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            memo[len(memo) if op.name == "MEMOIZE" else int(argument or 0)] = (
                stack[-1] if stack else 1
            )
            continue
        if op.name == "MARK":
            marks.append(len(stack))
            continue
        taken = sum(kind is not pickletools.markobject for kind in op.stack_before)
        start = len(stack) - taken
        if pickletools.markobject in op.stack_before:
            start = (marks.pop() if marks else 0) - op.stack_before.index(pickletools.markobject)
        start = max(start, 0)
        last = 1 + sum(stack[start:]) if op.name.startswith("TUPLE") else 1
        if last > _LARGEST_TUPLE:
            raise CheckpointError(
                f"{file} holds a tuple of more than {_LARGEST_TUPLE:,} parts",
                why="no model needs one",
                hint=FLAT,
            )
        stack[start:] = [last] * len(op.stack_after)


def damaged_records(file: Path, advance: Callable[[int], None]) -> Iterator[str]:
    """Read `file` as an archive, not as it was mapped, and say which records do not lie there as they are.

    Args:
        advance: called with the bytes of each block of a record.
    """
    with zipfile.ZipFile(file) as archive, file.open("rb") as raw:
        for record in archive.infolist():
            raw.seek(record.header_offset)
            name, extra = struct.unpack("<26x2H", raw.read(30))
            raw.seek(record.header_offset + 30 + name + extra)
            try:
                with archive.open(record) as stream:
                    while block := stream.read(_BLOCK):
                        if raw.read(len(block)) != block:
                            raise zipfile.BadZipFile("its bytes lie there in another form")
                        advance(len(block))
            except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                yield f"{record.filename}: {error}"


def _object_named_in(text: str) -> str:
    # torch's own text tells how to load the file nevertheless, which runs what is in it.
    named = re.search(r"GLOBAL ([\w.]+)", text)
    return (
        "it is no plain dictionary of tensors" if named is None else f"it names {escape(named[1])}"
    )
