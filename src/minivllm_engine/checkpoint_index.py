"""What a model directory holds, known from its headers alone: no tensor is read and no torch loaded."""

import difflib
import logging
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from minivllm_engine.checkpoint_names import (
    canonical_name,
    expected_tensors,
    foreign_layout,
    refusal,
)
from minivllm_engine.errors import CheckpointError
from minivllm_engine.model_config import ModelConfig
from minivllm_engine.safetensors_header import FLOAT_TYPES, TensorEntry, read_header
from minivllm_engine.shard_index import read_shard_index

logger = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SINGLE, _SHARDED = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_NEEDED = "A model is a directory with config.json, *.safetensors and tokenizer.json."
_LAYER = re.compile(r"(?<=\blayers\.)\d+")


def model_directory(model: str | Path) -> Path:
    """Where a model lies, if it is there: "demo" is the one in this package, anything else a path."""
    return Path(__file__).parent / "demo" if str(model) == "demo" else Path(model).expanduser()


def resolve_model(model: str | Path) -> Path:
    """The directory of a model: "demo" is the one in this package, anything else a path.

    Raises:
        CheckpointError: there is no such directory, or it has no config.json or no safetensors.
    """
    path = model_directory(model)
    try:
        is_empty = path.is_dir() and not any(path.iterdir())
    except OSError as error:
        raise CheckpointError(
            f"model directory {path} cannot be read", why=error.strerror
        ) from None
    if not path.exists():
        raise CheckpointError(
            f"model directory {path} does not exist",
            hint='Nothing is downloaded: give the path of a directory on this machine, or "demo".',
        )
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is a file, not a model directory", hint="Give the directory that holds it."
        )
    if is_empty:
        raise CheckpointError(f"model directory {path} is empty", hint=_NEEDED)
    if not (path / "config.json").is_file():
        found = Counter(file.suffix or file.name for file in path.iterdir())
        counts = ", ".join(f"{count} *{kind}" for kind, count in found.most_common(4))
        hint = f"{_conversion(path)} --model-config FILE" if _pickles(path) else _NEEDED
        raise CheckpointError(
            f"model directory {path} has no config.json (found: {counts})", hint=hint
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
                    f"two tensors for {name}",
                    why=" and ".join(f"{e.name} in {e.file}" for e in (entries[name], entry)),
                    hint="Remove the file that does not belong to the model.",
                )
            entries[name] = entry
        if not entries:
            raise CheckpointError(
                f"{path} holds no text tensor",
                why=f"{num_skipped} of its vision or MTP parts, which are not used",
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
        expected = expected_tensors(config)
        if config.tie_word_embeddings and HEAD not in self.entries:
            del expected[HEAD]
        missing = [name for name in expected if name not in self.entries]
        unexpected = [name for name in self.entries if name not in expected]
        misshapen = [
            name
            for name, dims in expected.items()
            if name in self.entries and self.entries[name].shape != tuple(size for _, size in dims)
        ]
        if not (missing or unexpected or misshapen):
            return
        lines = _lines("missing", missing, nearest_in=unexpected)
        lines += _lines("unexpected", unexpected, nearest_in=list(expected))
        for name in misshapen:
            sizes, keys = [size for _, size in expected[name]], [key for key, _ in expected[name]]
            found = list(self.entries[name].shape)
            lines.append(
                f"misshapen: {name} is {found}, config.json asks for {sizes} ({', '.join(keys)})"
            )
        raise CheckpointError(
            f"the tensors in {self.path} are not those that its config.json asks for",
            why="\n".join(lines),
            hint=self._hint(config, missing, misshapen),
        )

    def _hint(self, config: ModelConfig, missing: list[str], misshapen: list[str]) -> str:
        if any(
            name.endswith("conv1d.weight") and self.entries[name].shape[2:] == (1,)
            for name in misshapen
        ):
            # [channels, kernel, 1] is how MLX stores them, which also adds 1 to norm weights.
            return f"{_conversion(self.path)} (these are weights of an MLX conversion)"
        if missing == [HEAD]:
            return 'If the output head is the embedding, config.json must say "tie_word_embeddings": true.'
        if EMBEDDING in misshapen and self.entries[EMBEDDING].shape[1:] == (config.hidden_size,):
            rows = self.entries[EMBEDDING].shape[0]
            return f"The embedding has {rows} rows, vocab_size is {config.vocab_size}."
        if (self.path / "minivllm_manifest.json").is_file():
            return f"minivllm convert-weights SRC {shlex.quote(str(self.path))} --check"
        return "Use the config.json that came with these weights, or copy the weights again."

    def seems_tied(self, config: ModelConfig) -> bool:
        """As `is_tied` by names alone, without reading weights: a head beside `tie_word_embeddings` is
        taken for a copy of the embedding."""
        return HEAD not in self.entries or config.tie_word_embeddings

    def is_tied(self, config: ModelConfig) -> bool:
        """Whether the output head is the embedding, once `check` has passed.

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
        return files
    pickles = _pickles(path)
    if pickles:
        raise CheckpointError(
            f"model directory {path} has no safetensors, only {', '.join(pickles[:4])}",
            why="a model is loaded from safetensors alone",
            hint=_conversion(path),
        )
    raise CheckpointError(
        f"model directory {path} has no *.safetensors",
        hint="The weights have to lie beside config.json.",
    )


def _pickles(path: Path) -> list[str]:
    return sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))


def _conversion(path: Path) -> str:
    """The command that makes a loadable checkpoint of `path`."""
    return f"minivllm convert-weights {shlex.quote(str(path))} DST"


def _stored_tensors(path: Path) -> list[TensorEntry]:
    return [entry for file in _weight_files(path) for entry in read_header(file)]


def _check_layout(entry: TensorEntry) -> None:
    refused = refusal(entry.name)
    if refused:
        raise CheckpointError(
            f"{entry.file} holds {entry.name}", why=refused.why, hint=refused.remedy
        )
    layout = foreign_layout(entry.name)
    if layout:
        raise CheckpointError(
            f"{entry.file} holds {entry.name}",
            why=f"this is another producer's layout ({layout}), which is converted first",
            hint=_conversion(entry.file.parent),
        )


def _check_types(entries: dict[str, TensorEntry]) -> None:
    wrong = [entry for entry in entries.values() if entry.dtype not in FLOAT_TYPES]
    if wrong:
        types = ", ".join(sorted({entry.dtype for entry in wrong}))
        raise CheckpointError(
            f"{wrong[0].file} holds {len(wrong)} tensors of type {types}",
            why=f"such as {wrong[0].name}; only {', '.join(FLOAT_TYPES)} can be read",
            hint="Use the checkpoint that was not quantised.",
        )


def _lines(kind: str, names: list[str], *, nearest_in: list[str]) -> list[str]:
    """One line for all layers that share a name."""
    layers: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        match = _LAYER.search(name)
        layers[_LAYER.sub("*", name)].append(match[0] if match else "")
    others = sorted({_LAYER.sub("*", name) for name in nearest_in})
    return [
        f"{kind}: {_filled(name, numbers)}{_nearest(name, others)}"
        for name, numbers in layers.items()
    ]


def _filled(pattern: str, numbers: Iterable[str]) -> str:
    numbers = list(numbers)
    return pattern.replace("*", numbers[0] if len(numbers) == 1 else "{" + ",".join(numbers) + "}")


def _nearest(name: str, others: list[str]) -> str:
    close = difflib.get_close_matches(name, others, n=1, cutoff=0.8)
    return f" (nearest: {close[0]})" if close else ""


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
