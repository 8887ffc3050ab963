"""A checkpoint to convert: its files and what their headers say."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from minivllm_engine.checkpoint.locate import expanded, locate
from minivllm_engine.checkpoint.names import bare_name, refusal, skip_rule, without_wrappers
from minivllm_engine.checkpoint.safetensors_header import FLOAT_TYPES, TensorEntry, read_header
from minivllm_engine.checkpoint.shard_index import ShardIndex, indexed_tensors
from minivllm_engine.conversion.report import reading_errors
from minivllm_engine.conversion.source_files import (
    WeightFiles,
    carried_name,
    check_readable,
    find_weights,
    side_files,
)
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape
from minivllm_engine.model_config.generation_config import read_json_object


@dataclass(frozen=True)
class Source:
    """A checkpoint whose headers have been read.

    Attributes:
        path: as it was given, a directory or one file. directory: where config and side files lie.
        format: safetensors, or files of torch.save.
        tensors: in the order of the files, under the names that they have there.
        entered: keys of the containers around the weights, outermost first (torch files only).
        config_file, config: its config.json.
        side_files: tokenizer, chat template, generation config and licence: copied as they are.
        notes: what a user should know about the choice of files.
    """

    path: Path
    directory: Path
    format: Literal["safetensors", "torch"]
    files: tuple[Path, ...]
    tensors: tuple[TensorEntry, ...]
    entered: tuple[str, ...]
    config_file: Path
    config: Mapping[str, Any]
    side_files: tuple[Path, ...]
    notes: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.tensors)


@reading_errors()
def open_source(
    path: str | Path,
    *,
    model_config: str | Path | None = None,
    state_key: str | None = None,
    ema: bool = False,
) -> Source:
    """Find the weights of `path` and read their headers; no torch for safetensors.

    Args:
        path: a directory, one .safetensors, .pt, .pth or .bin file, or what else `locate` takes.
        model_config: the config.json to use; by default the one beside the weights.
        state_key: which entry of a container holds the weights, dots for levels.
        ema: take the averaged weights of a container that holds both.

    Raises:
        CheckpointError: nothing readable there, a broken file, or a kind that cannot be converted
            (quantised, GGUF, adapters, other families), each with its way out.
    """
    path = locate(path)
    found = find_weights(path)
    directory = path if path.is_dir() else path.parent
    for file in found.files:
        check_readable(file)
    config_file = expanded(model_config) if model_config else directory / "config.json"
    config = _read_config(config_file, given=model_config is not None)
    tensors, entered = _read_tensors(found, state_key, ema)
    indexed: list[str] = []
    if found.index:
        tensors, indexed = _by_index(found.index, tensors)
    _check_once(tensors)
    _check_layout(tensors)
    beside, notes = _side_files(directory, config_file.parent)
    return Source(
        path=path,
        directory=directory,
        format=found.format,
        files=found.files,
        tensors=tuple(tensors),
        entered=entered,
        config_file=config_file,
        config=config,
        side_files=beside,
        notes=(*found.notes, *indexed, *notes),
    )


def _side_files(directory: Path, config_directory: Path) -> tuple[tuple[Path, ...], list[str]]:
    """Those beside the weights; where there is no tokenizer among them, those beside the config too."""
    files = {carried_name(file): file for file in side_files(directory)}
    if "tokenizer.json" in files or config_directory.resolve() == directory.resolve():
        return tuple(files.values()), []
    others = {carried_name(file): file for file in side_files(config_directory)}
    taken = [name for name in others if name not in files]
    notes = (
        [f"{', '.join(taken)} taken from {config_directory}, beside the config"] if taken else []
    )
    return tuple((others | files).values()), notes


def _read_config(file: Path, *, given: bool) -> Mapping[str, Any]:
    if not given and not file.is_file():
        # `is_file` is False for a link in a circle too, which deserves its own words.
        if file.is_symlink():
            check_readable(file)
        raise CheckpointError(
            f"{file.parent} has no config.json",
            why="nothing says which shape the model has",
            hint="--model-config FILE with the config.json of the model",
        )
    check_readable(file)
    config = read_json_object(file)
    key = next((k for k in ("quantization_config", "quantization") if config.get(k)), None)
    if key is not None:
        method = config[key]
        name = method.get("quant_method") if isinstance(method, Mapping) else None
        raise CheckpointError(
            f"{file} says that the weights are quantised" + (f" ({escape(name)})" if name else ""),
            why=f"{key} is set; only {', '.join(FLOAT_TYPES)} can be converted",
            hint="Dequantise the checkpoint first, or use the one that it was made from.",
        )
    return config


def _read_tensors(
    found: WeightFiles, state_key: str | None, ema: bool
) -> tuple[list[TensorEntry], tuple[str, ...]]:
    entered: tuple[str, ...] = ()
    if found.format == "safetensors":
        if state_key or ema:
            option = "--state-key" if state_key else "--ema"
            raise CheckpointError(
                f"{option} is for files of torch.save, and {found.files[0]} is none",
                why="safetensors hold tensors by name, with no containers around them",
                hint=f"Leave {option} out.",
            )
        tensors = [entry for file in found.files for entry in read_header(file)]
    else:
        from minivllm_engine.conversion.torch_file import load_torch_file, torch_entries

        tensors = []
        for file in found.files:
            weights = load_torch_file(file, state_key=state_key, ema=ema)
            if tensors and weights.entered != entered:
                raise CheckpointError(
                    f"{file} keeps its weights elsewhere than the files before it",
                    why=f"under {_key(weights.entered)}, not under {_key(entered)}",
                    hint="Save all parts alike: torch.save of one flat dictionary each.",
                )
            tensors += torch_entries(file, weights)
            entered = weights.entered
    if not tensors:
        raise CheckpointError(
            f"{found.files[0].parent} holds no tensor at all",
            why=f"the header of {found.files[0].name} names none",
            hint="Use the file that has the weights.",
        )
    return tensors, entered


def _check_once(tensors: Iterable[TensorEntry]) -> None:
    files: dict[str, Path] = {}
    for entry in tensors:
        if entry.name in files:
            raise CheckpointError(
                f"two files hold the tensor {escape(entry.name)}",
                why=f"{files[entry.name]} and {entry.file}",
                hint="Remove the file that does not belong to the checkpoint.",
            )
        files[entry.name] = entry.file


def _by_index(index: ShardIndex, tensors: list[TensorEntry]) -> tuple[list[TensorEntry], list[str]]:
    """The tensors that the index names, and a note of what it leaves out."""
    taken, told = indexed_tensors(index, tensors)
    size = sum(entry.num_bytes for entry in taken)
    if index.total_size is not None and index.total_size != size:
        raise CheckpointError(
            f"{index.file} does not describe its shards",
            why=f"it says {index.total_size:,} bytes, the tensors have {size:,}",
            hint="Copy the index and the shards again, from one place.",
        )
    return taken, [told] if told else []


def _key(entered: tuple[str, ...]) -> str:
    return escape(".".join(entered)) if entered else "no key"


def _check_layout(tensors: list[TensorEntry]) -> None:
    for entry in tensors:
        if skip_rule(bare_name(entry.name)):
            continue
        refused = refusal(without_wrappers(entry.name))
        if refused:
            raise CheckpointError(
                f"{entry.file} holds {escape(entry.name)}",
                why=refused.why,
                hint=refused.remedy,
            )
