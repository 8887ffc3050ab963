"""What a model directory holds, known from its headers alone: no tensor is read and no torch loaded."""

import logging
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from minivllm_engine.checkpoint.locate import gguf_file, locate, refuse_what_is_no_model
from minivllm_engine.checkpoint.mismatch import conversion_command, mismatch
from minivllm_engine.checkpoint.names import (
    EMBEDDING,
    HEAD,
    canonical_name,
    foreign_layout,
    refusal,
)
from minivllm_engine.checkpoint.safetensors_header import FLOAT_TYPES, TensorEntry, read_header
from minivllm_engine.checkpoint.shard_index import (
    check_shard_sets,
    indexed_tensors,
    read_shard_index,
)
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape, listed
from minivllm_engine.core.units import count_text
from minivllm_engine.model_config.config import ModelConfig

logger = logging.getLogger(__name__)

_SINGLE, _SHARDED = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_NEEDED = "A model is a directory with config.json, *.safetensors and tokenizer.json."


def resolve_model(model: str | Path) -> Path:
    """Find the directory of a model: see `locate`.

    Raises:
        CheckpointError: there is no such directory, or it has no config.json or no safetensors.
    """
    path = locate(model)
    if not path.is_dir():
        if path.suffix == ".gguf":
            raise gguf_file(path)
        raise CheckpointError(
            f"{path} is a file, not a model directory",
            why="config.json and tokenizer.json are needed beside the weights",
            hint=f"Give the directory that holds it: {shlex.quote(str(path.parent))}",
        )
    try:
        names = sorted(file.name for file in path.iterdir())
    except OSError as error:
        raise CheckpointError(
            f"model directory {path} cannot be read",
            why=error.strerror or str(error),
            hint="See that it is there and that you may read it.",
        ) from None
    refuse_what_is_no_model(path, names)
    is_empty = not names
    if is_empty:
        raise CheckpointError(
            f"model directory {path} is empty", why="it holds no file at all", hint=_NEEDED
        )
    if not (path / "config.json").is_file():
        kinds = ("/" if file.is_dir() else file.suffix or file.name for file in path.iterdir())
        found = Counter(kinds).most_common(4)
        counts = ", ".join(
            count_text(count, "folder") if kind == "/" else f"{count} *{kind}"
            for kind, count in found
        )
        hint = f"{conversion_command(path)} --model-config FILE" if _pickles(path) else _NEEDED
        raise CheckpointError(
            f"model directory {path} has no config.json (found: {counts})",
            why="nothing else says which shape the model has",
            hint=hint,
        )
    _weight_files(path)
    return path


@dataclass(frozen=True)
class CheckpointIndex:
    """The text tensors of a checkpoint by canonical name.

    Attributes:
        path: the model directory.
        entries: canonical name -> where the tensor lies.
        num_skipped: tensors of the vision and MTP parts, which are left out.
    """

    path: Path
    entries: dict[str, TensorEntry]
    num_skipped: int

    @classmethod
    def open(cls, path: Path) -> "CheckpointIndex":
        """Read the headers of all safetensors of the directory `path`.

        Raises:
            CheckpointError: no or broken files, a missing shard, two tensors for one name, a layout or
                number type that is not supported, or not a single text tensor.
        """
        if (path / _SINGLE).is_file() and (path / _SHARDED).is_file():
            logger.warning("%s holds both %s and %s: reading the former.", path, _SINGLE, _SHARDED)
        entries: dict[str, TensorEntry] = {}
        num_skipped = 0
        for entry in _stored_tensors(path):
            name = canonical_name(entry.name)
            if name is None:
                num_skipped += 1
                continue
            _check_layout(entry)
            if name in entries:
                raise CheckpointError(
                    f"two tensors for {escape(name)}",
                    why=" and ".join(
                        f"{escape(e.name)} in {e.file}" for e in (entries[name], entry)
                    ),
                    hint="Remove the file that does not belong to the model.",
                )
            entries[name] = entry
        if not entries:
            raise CheckpointError(
                f"{path} holds no text tensor",
                why=f"{num_skipped} of its vision or MTP parts, which are not used",
                hint="Use the whole checkpoint.",
            )
        _check_types(entries)
        return cls(path, entries, num_skipped)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all text tensors as they are stored."""
        return sum(entry.num_bytes for entry in self.entries.values())

    def check(self, config: ModelConfig) -> None:
        """Compare names and shapes with what `config` asks for.

        Raises:
            CheckpointError: one report of every missing, unexpected and misshapen tensor.
        """
        refused = mismatch(self.path, self.entries, config)
        if refused is not None:
            raise refused

    def seems_tied(self, config: ModelConfig) -> bool:
        """Say by names alone whether the head is the embedding: one beside `tie_word_embeddings` is taken
        for a copy of it."""
        return HEAD not in self.entries or config.tie_word_embeddings

    def is_tied(self, config: ModelConfig) -> bool:
        """Say whether the output head is the embedding, once `check` has passed.

        A head in the file counts unless the config says tied and it equals the embedding; where it
        differs all the same, that is logged. Compares the stored bytes, so it may read both.
        """
        if HEAD not in self.entries:
            return True
        if not config.tie_word_embeddings:
            return False
        if _same_bytes(self.entries[HEAD], self.entries[EMBEDDING]):
            return True
        logger.warning(
            "config.json in %s says tie_word_embeddings, but lm_head.weight differs from the "
            "embedding: using both.",
            self.path,
        )
        return False


def _weight_files(path: Path) -> list[Path]:
    single, sharded = path / _SINGLE, path / _SHARDED
    if single.is_file():
        return [single]
    if sharded.is_file():
        return list(read_shard_index(sharded).shards)
    files = sorted(path.glob("*.safetensors"))
    if files:
        check_shard_sets(path, [file.name for file in files])
        return files
    pickles = _pickles(path)
    if pickles:
        raise CheckpointError(
            f"model directory {path} has no safetensors, only {listed(pickles)}",
            why="a model is loaded from safetensors alone",
            hint=conversion_command(path),
        )
    raise CheckpointError(
        f"model directory {path} has no *.safetensors",
        why="a model is loaded from safetensors alone, and there is no other file of weights either",
        hint="The weights have to lie beside config.json.",
    )


def _pickles(path: Path) -> list[str]:
    return sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))


def _stored_tensors(path: Path) -> list[TensorEntry]:
    stored = [entry for file in _weight_files(path) for entry in read_header(file)]
    if (path / _SINGLE).is_file() or not (path / _SHARDED).is_file():
        return stored
    tensors, left_out = indexed_tensors(read_shard_index(path / _SHARDED), stored)
    if left_out:
        logger.warning("%s", left_out)
    return tensors


def _check_layout(entry: TensorEntry) -> None:
    refused = refusal(entry.name)
    if refused:
        raise CheckpointError(
            f"{entry.file} holds {escape(entry.name)}", why=refused.why, hint=refused.remedy
        )
    layout = foreign_layout(entry.name)
    if layout:
        raise CheckpointError(
            f"{entry.file} holds {escape(entry.name)}",
            why=f"this is another producer's layout ({layout}), which is converted first",
            hint=conversion_command(entry.file.parent),
        )


def _check_types(entries: dict[str, TensorEntry]) -> None:
    wrong = [entry for entry in entries.values() if entry.dtype not in FLOAT_TYPES]
    if wrong:
        types = listed(sorted({entry.dtype for entry in wrong}))
        raise CheckpointError(
            f"{wrong[0].file} holds {count_text(len(wrong), 'tensor')} of type {types}",
            why=f"such as {escape(wrong[0].name)}; only {', '.join(FLOAT_TYPES)} can be read",
            hint="Use the checkpoint that was not quantised.",
        )


def _same_bytes(first: TensorEntry, second: TensorEntry) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with first.file.open("rb") as a, second.file.open("rb") as b:
        a.seek(first.begin)
        b.seek(second.begin)
        left = first.num_bytes
        while left > 0:
            size = min(left, 1 << 20)
            if a.read(size) != b.read(size):
                return False
            left -= size
    return True
