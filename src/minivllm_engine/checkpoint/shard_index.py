"""The index of a checkpoint in several files: which file holds which tensor."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from minivllm_engine.checkpoint.safetensors_header import TensorEntry
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape, listed
from minivllm_engine.core.units import count_text

# One of several files of a checkpoint, such as model-00001-of-00003.safetensors.
_NUMBERED = re.compile(r"(.+-)(\d{5})(-of-)(\d{5})(\.\w+)")

_MOST_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """Content of an index file.

    Attributes:
        shards: the files that it names, sorted; all of them exist.
        weight_map: tensor -> name of its file.
        total_size: bytes of all tensors, where it says so.
    """

    file: Path
    shards: tuple[Path, ...]
    weight_map: Mapping[str, str]
    total_size: int | None


def read_shard_index(file: Path) -> ShardIndex:
    """Read `file`, such as model.safetensors.index.json.

    Raises:
        CheckpointError: it is no index, names a file outside its directory, or one that is not there.
    """
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        content = json.loads(file.read_text(encoding="utf-8"))
        weight_map = content["weight_map"]
        names = sorted(set(weight_map.values()))
        shards = [file.parent / name for name in names]
        leaving = [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]
        total_size = (content.get("metadata") or {}).get("total_size")
        if not names:
            raise ValueError("no tensor")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is not an index of safetensors",
            why=_what_is_wrong(error),
            hint='It needs an object "weight_map" that names a file for each tensor.',
        ) from None
    if leaving:
        raise CheckpointError(
            f"{file} names a shard outside its directory",
            why=escape(leaving[0]),
            hint="Only files inside the model directory are read.",
        )
    absent = [name or "one without a name" for name in names if not _is_file(file.parent / name)]
    if absent:
        raise CheckpointError(
            f"{file.parent} lacks {len(absent)} of {len(shards)} shards that its index names",
            why=listed(absent),
            hint="Copy the missing files into the directory.",
        )
    size = total_size if isinstance(total_size, int) else None
    if isinstance(total_size, float) and total_size.is_integer():
        size = int(total_size)
    return ShardIndex(file, tuple(shards), weight_map, size)


def indexed_tensors(
    index: ShardIndex, stored: Iterable[TensorEntry]
) -> tuple[list[TensorEntry], str | None]:
    """Find the tensors that the index names, each in the file it says, and say what it leaves out.

    Args:
        stored: all tensors of its shards.

    Raises:
        CheckpointError: a tensor does not lie where the index says.
    """
    taken: dict[str, TensorEntry] = {}
    others: dict[str, TensorEntry] = {}
    for entry in stored:
        file = index.weight_map.get(entry.name)
        right = file is not None and index.file.parent / file == entry.file
        (taken if right else others)[entry.name] = entry
    lost = next((name for name in index.weight_map if name not in taken), None)
    if lost is not None:
        where = f"it lies in {others[lost].file.name}" if lost in others else "no shard holds it"
        raise CheckpointError(
            f"{index.file} does not describe its shards",
            why=f"it says that {escape(lost)} lies in {escape(index.weight_map[lost])}; {where}",
            hint="Copy the index and the shards again, from one place.",
        )
    if not others:
        return list(taken.values()), None
    told = f"{index.file} leaves out {count_text(len(others), 'tensor')} of its shards ({listed(others, 2)})"
    return list(taken.values()), told


def _what_is_wrong(error: Exception) -> str:
    if isinstance(error, OSError):
        return str(error.strerror)
    if isinstance(error, ValueError):
        return escape(error)  # no JSON, not UTF-8, or empty
    if isinstance(error, RecursionError):
        return "its JSON is nested too deeply"
    return "weight_map is not there" if isinstance(error, KeyError) else "it is built otherwise"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file can have
        return False


def shard_set(name: str) -> tuple[str, ...] | None:
    """List all files of the set that `name` says it is one of, or None where it is not numbered so."""
    match = _NUMBERED.fullmatch(name)
    if match is None:
        return None
    start, _, of, count, suffix = match.groups()
    return tuple(f"{start}{i:05}{of}{count}{suffix}" for i in range(1, int(count) + 1))


def check_shard_sets(directory: Path, names: Iterable[str]) -> None:
    """Check by names, without an index, that all files of a set are there.

    Raises:
        CheckpointError: some are missing.
    """
    names = set(names)
    sets: defaultdict[tuple[str, ...], int] = defaultdict(int)
    for name in names:
        whole = shard_set(name)
        if whole:
            sets[whole] += 1
    for whole in sets:
        absent = [name for name in whole if name not in names]
        if absent:
            raise CheckpointError(
                f"{directory} lacks {len(absent)} of {len(whole)} shards",
                why=listed(absent),
                hint="Copy the missing files into the directory.",
            )
