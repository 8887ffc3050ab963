"""Which files of a source hold the weights, and which go along with them. No file of weights is opened."""

import os
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from minivllm_engine.checkpoint.locate import gguf_file, refuse_what_is_no_model
from minivllm_engine.checkpoint.safetensors_header import LFS_POINTER, git_lfs_pointer
from minivllm_engine.checkpoint.shard_index import (
    ShardIndex,
    check_shard_sets,
    read_shard_index,
    shard_set,
)
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import listed

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_SINGLE, _SHARDED = "model.safetensors", "model.safetensors.index.json"
_SHARDED_TORCH = "pytorch_model.bin.index.json"
_TORCH_FIRST = ("model.pt", "pytorch_model.bin", "model.pth", "model.bin")

# Files that belong to a model and are no weights, and are carried over as they are.
SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
# A folder of further chat templates, carried over as it is too.
TEMPLATES = "additional_chat_templates"
LICENCES = ("LICENSE", "LICENCE", "NOTICE", "COPYING")

_SEE_THAT_IT_IS_THERE = "See that it is there in full and that you may read it."

Format = Literal["safetensors", "torch"]


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of weights of one checkpoint.

    Attributes:
        index: what says which tensor lies where, if the weights were found by it.
        notes: files that were passed over, as sentences.
    """

    format: Format
    files: tuple[Path, ...]
    index: ShardIndex | None
    notes: tuple[str, ...]


def find_weights(path: Path) -> WeightFiles:
    """Find the weights of `path`, a directory or one file.

    Raises:
        CheckpointError: there are none, several checkpoints lie there, or they are of a kind that is
            not converted.
    """
    try:
        names = sorted(os.listdir(path)) if path.is_dir() else None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read", why=_reason(error), hint=_SEE_THAT_IT_IS_THERE
        ) from None
    if names is None:
        whole = shard_set(path.name) or ()
        if len(whole) > 1:
            raise CheckpointError(
                f"{path} is one of {len(whole)} shards of a checkpoint",
                why="a part of a model cannot be converted",
                hint=f"Give the directory that holds them all: {shlex.quote(str(path.parent))}",
            )
        return WeightFiles(_format_of(path), (path,), None, ())
    return _in_directory(path, names)


def side_files(directory: Path) -> tuple[Path, ...]:
    """Find tokenizer, chat template, generation config and licence files, as far as they are there.

    Raises:
        CheckpointError: one of them is a link that leads nowhere or in a circle, or a Git LFS pointer.
    """
    names = sorted(os.listdir(directory))
    found = [name for name in names if name in SIDE_FILES or is_licence(name)]
    found += [
        f"{TEMPLATES}/{file.name}" for file in sorted((directory / TEMPLATES).glob("*.jinja"))
    ]
    for name in found:
        check_readable(directory / name)
        with (directory / name).open("rb") as stream:
            if stream.read(len(LFS_POINTER)) == LFS_POINTER:
                raise git_lfs_pointer(directory / name)
    return tuple(directory / name for name in found)


def carried_name(file: Path) -> str:
    """Say where a side file lies in a checkpoint, the templates of a folder with it."""
    return f"{TEMPLATES}/{file.name}" if file.parent.name == TEMPLATES else file.name


def is_licence(name: str) -> bool:
    return name.split(".")[0].split("-")[0].upper() in LICENCES


def check_readable(file: Path) -> None:
    """Check that `file` can be read.

    Raises:
        CheckpointError: `file` is not there, is a link that leads nowhere or in a circle, or is no file.
    """
    try:
        os.stat(file)
        if not file.is_file():
            raise CheckpointError(
                f"{file} is not a regular file",
                why=f"it is a {'directory' if file.is_dir() else 'device, pipe or socket'}",
                hint="Put the file itself in its place.",
            )
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read", why=_reason(error), hint=_SEE_THAT_IT_IS_THERE
        ) from None


def _reason(error: OSError) -> str:
    where = Path(error.filename) if error.filename else None
    if where is not None and where.is_symlink():
        return f"{error.strerror}: it is a link to {os.readlink(where)}"
    return str(error.strerror)


def _format_of(file: Path) -> Format:
    if file.suffix == ".safetensors":
        return "safetensors"
    if file.suffix in _TORCH_SUFFIXES:
        return "torch"
    if file.suffix == ".gguf":
        raise gguf_file(file)
    raise CheckpointError(
        f"{file} is no file of weights",
        why=f"known are .safetensors, {', '.join(_TORCH_SUFFIXES)}",
        hint="Give the directory that holds the checkpoint, or its file of weights.",
    )


def _in_directory(path: Path, names: list[str]) -> WeightFiles:
    refuse_what_is_no_model(path, names)
    safetensors = [name for name in names if name.endswith(".safetensors")]
    if safetensors:
        return _safetensors(path, names, safetensors)
    torch_files = [name for name in names if _is_torch_weights(name)]
    if torch_files:
        return _torch(path, names, torch_files)
    counts = Counter(Path(name).suffix or name for name in names).most_common(4)
    found = ", ".join(f"{count} *{kind}" for kind, count in counts)
    raise CheckpointError(
        f"{path} has no weights (found: {found or 'nothing'})",
        why=f"none of its {len(names):,} entries is called *.safetensors, *{', *'.join(_TORCH_SUFFIXES)}",
        hint="A source holds *.safetensors, or model.pt, or pytorch_model.bin.",
    )


def _is_torch_weights(name: str) -> bool:
    # MiniQwen's exports keep a pickled config beside the weights, trainers their optimizer and arguments.
    stem = name.split(".")[0]
    return name.endswith(_TORCH_SUFFIXES) and not (
        stem.endswith("config") or stem in ("training_args", "optimizer", "scheduler", "scaler")
    )


def _safetensors(path: Path, names: list[str], found: list[str]) -> WeightFiles:
    passed_over = [name for name in names if _is_torch_weights(name)]
    notes = [_passed_over(path, passed_over, "the safetensors are read")] if passed_over else []
    if _SINGLE in found:
        others = [name for name in found if name != _SINGLE]
        if others:
            notes.append(_passed_over(path, others, f"{_SINGLE} is read"))
        return WeightFiles("safetensors", (path / _SINGLE,), None, tuple(notes))
    if _SHARDED in names:
        index = read_shard_index(path / _SHARDED)
        others = [name for name in found if path / name not in index.shards]
        if others:
            notes.append(_passed_over(path, others, f"{_SHARDED} does not name them"))
        return WeightFiles("safetensors", index.shards, index, tuple(notes))
    check_shard_sets(path, found)
    return WeightFiles("safetensors", tuple(path / name for name in found), None, tuple(notes))


def _torch(path: Path, names: list[str], found: list[str]) -> WeightFiles:
    if _SHARDED_TORCH in names:
        index = read_shard_index(path / _SHARDED_TORCH)
        return WeightFiles("torch", index.shards, index, ())
    sets = {shard_set(name) for name in found}
    if len(sets) == 1 and None not in sets:
        # All are numbered parts of one checkpoint.
        check_shard_sets(path, found)
        return WeightFiles("torch", tuple(path / name for name in found), None, ())
    first = next((name for name in _TORCH_FIRST if name in found), None)
    if first is None and len(found) > 1:
        raise CheckpointError(
            f"{path} holds {len(found)} checkpoints",
            why=listed(found, 6),
            hint=f"Give one of them as the source: {shlex.quote(str(path / found[-1]))}",
        )
    chosen = first or found[0]
    others = [name for name in found if name != chosen]
    notes = (_passed_over(path, others, f"{chosen} is read"),) if others else ()
    return WeightFiles("torch", (path / chosen,), None, notes)


def _passed_over(path: Path, names: list[str], reason: str) -> str:
    return f"{path}: {listed(names, 3)} passed over: {reason}"
