"""The index of a checkpoint in several files: which file holds which tensor."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minivllm_engine.errors import CheckpointError


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
        content = json.loads(file.read_text(encoding="utf-8"))
        weight_map = content["weight_map"]
        names = sorted(set(weight_map.values()))
        shards = [file.parent / name for name in names]
        leaving = [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]
        total_size = (content.get("metadata") or {}).get("total_size")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"{file} is not an index of safetensors", hint='It needs an object "weight_map".'
        ) from None
    if leaving:
        raise CheckpointError(
            f"{file} names a shard outside its directory",
            why=leaving[0],
            hint="Only files inside the model directory are read.",
        )
    absent = [shard.name for shard in shards if not shard.is_file()]
    if absent:
        raise CheckpointError(
            f"{file.parent} lacks {len(absent)} of {len(shards)} shards that its index names",
            why=", ".join(absent),
            hint="Copy the missing files into the directory.",
        )
    size = int(total_size) if isinstance(total_size, int | float) else None
    return ShardIndex(file, tuple(shards), weight_map, size)
