"""What is remembered of a conversion: in `.conversion.json` while it runs, in the manifest for good."""

import hashlib
import json
import os
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minivllm_engine import __version__
from minivllm_engine.checkpoint.mismatch import MANIFEST
from minivllm_engine.conversion.destination import STATE, is_filled
from minivllm_engine.conversion.options import ConvertOptions
from minivllm_engine.conversion.plan import MAPPING, Plan, partial_path
from minivllm_engine.conversion.report import Cast, ShardReport
from minivllm_engine.conversion.source_files import carried_name
from minivllm_engine.core.atomic_file import write_atomic
from minivllm_engine.core.errors import CheckpointError, ConfigError
from minivllm_engine.core.escape import escape
from minivllm_engine.model_config.generation_config import read_json_object

_BLOCK = 1 << 22


def sha256_of(file: Path, advance: Callable[[int], None] | None = None) -> str:
    """Hash a file, in hexadecimal. advance: called with the bytes of each block that was read."""
    digest = hashlib.sha256()
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(view[:count])
            if advance:
                advance(count)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class FinishedShard:
    """A shard that has its final name, and what its casts lost."""

    name: str
    num_bytes: int
    sha256: str
    casts: tuple[Cast, ...]


def fingerprint(plan: Plan) -> str:
    """Hash everything that decides the bytes of the target."""
    files = [*plan.source.files, *plan.source.side_files]
    parts = [
        MAPPING,
        plan.config,
        [(os.path.realpath(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files],
        [repr(piece) for piece in plan.pieces],
        [repr(shard) for shard in plan.shards],
        [repr(target) for target in plan.targets],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write `content` durably."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # A path need not be UTF-8; what Python has for its bytes is escaped as JSON has it: \udcff.
    write_atomic(file, text.encode("utf-8", "backslashreplace"), durable=True)


def write_state(directory: Path, word: str, shards: Sequence[FinishedShard]) -> None:
    content = {"fingerprint": word, "shards": [asdict(shard) for shard in shards]}
    write_json(directory / STATE, content)


def read_state(directory: Path) -> tuple[str, tuple[FinishedShard, ...]] | None:
    """Read (fingerprint, shards) of an unfinished conversion; None where none can be read."""
    try:
        content = read_json_object(directory / STATE)
        shards = tuple(
            FinishedShard(
                name=shard["name"],
                num_bytes=shard["num_bytes"],
                sha256=shard["sha256"],
                casts=tuple(Cast(**cast) for cast in shard["casts"]),
            )
            for shard in content["shards"]
        )
        return str(content["fingerprint"]), shards
    except (CheckpointError, KeyError, TypeError):
        return None


def source_hashes(plan: Plan, advance: Callable[[int], None] | None = None) -> list[dict[str, Any]]:
    return [
        {"name": file.name, "bytes": file.stat().st_size, "sha256": sha256_of(file, advance)}
        for file in plan.source.files
    ]


def manifest_content(
    plan: Plan,
    *,
    word: str,
    argv: tuple[str, ...],
    sources: list[dict[str, Any]],
    shards: Sequence[ShardReport],
    casts: Sequence[Cast],
    verified: str,
) -> dict[str, Any]:
    operations: Counter[str] = Counter()
    for row in plan.rows:
        operations[row.op] += row.count
    dropped = Counter(tensor.rule for tensor in plan.dropped)
    return {
        "schema_version": 1,
        "kind": "manifest",
        "tool": f"minivllm {__version__}",
        "mapping": MAPPING,
        "style": list(plan.style),
        "argv": list(argv),
        "dtype": plan.options.dtype,
        "options": plan.options.to_json(),
        "fingerprint": word,
        "source": sources,
        # Not empty: incomplete, made with --allow-missing; no engine loads it.
        "missing": list(plan.missing),
        "counts": {
            "read": plan.num_used,
            "written": len(plan.targets),
            "operations": dict(operations),
        },
        "dropped": [{"rule": rule, "tensors": count} for rule, count in dropped.items()],
        "casts": [asdict(cast) for cast in casts],
        "files": [
            {"name": carried_name(file), "sha256": sha256_of(file)}
            for file in plan.source.side_files
        ],
        "shards": [
            {
                "name": shard.name,
                "bytes": shard.num_bytes,
                "sha256": shard.sha256,
                "verified": verified,
            }
            for shard in shards
        ],
    }


def index_content(plan: Plan) -> dict[str, Any]:
    """Return the index of a target in several files."""
    weight_map = {name: shard.name for shard in plan.shards for name in shard.tensors}
    return {
        "metadata": {"total_size": plan.bytes_out},
        "weight_map": dict(sorted(weight_map.items())),
    }


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest of a finished conversion.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    file = directory / MANIFEST
    if not file.is_file():
        raise CheckpointError(
            f"{directory} has no {MANIFEST}"
            if directory.is_dir()
            else f"{directory} is no directory that convert-weights has written",
            why="only what convert-weights has written can be checked against its source",
            hint=_how_to_make(directory),
        )
    manifest = read_json_object(file)
    shards = manifest.get("shards")
    is_one = manifest.get("kind") == "manifest"
    if not is_one or not isinstance(shards, list) or not all(map(_is_shard, shards)):
        raise CheckpointError(
            f"{file} is not a manifest of convert-weights",
            why="its shards lack a name, a size or a hash"
            if is_one
            else f"its kind is {escape(repr(manifest.get('kind')))}, not 'manifest'",
            hint=f"Convert again: {_command(directory)} --overwrite",
        )
    return manifest


def _is_shard(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("sha256"), str)
        and isinstance(value.get("bytes"), int)
    )


def _how_to_make(directory: Path) -> str:
    if partial_path(directory).is_dir():
        return f"{partial_path(directory)} is there, unfinished: {_command(directory)} --resume"
    again = " --overwrite" if is_filled(directory) else ""
    return f"Convert first: {_command(directory)}{again}"


def _command(directory: Path) -> str:
    return f"minivllm convert-weights SRC {shlex.quote(str(directory))}"


def manifest_options(manifest: Mapping[str, Any], file: Path) -> ConvertOptions:
    """Return the options that a conversion was made with.

    Args:
        file: where `manifest` was read, for the error.

    Raises:
        CheckpointError: it does not have them as this program writes them.
    """
    try:
        given = dict(manifest["options"])
        given["renames"] = tuple((source, target) for source, target in given["renames"])
        for key in ("allow_unmatched", "allow_missing"):
            given[key] = tuple(given[key])
        return ConvertOptions(**given)
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise CheckpointError(
            f"{file} does not say how it was converted",
            why=f"its options cannot be read: {escape(str(error))}",
            hint=f"Convert again: {_command(file.parent)} --overwrite",
        ) from None
