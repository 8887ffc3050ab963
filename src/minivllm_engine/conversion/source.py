"""A checkpoint to convert: its files and what their headers say."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from minivllm_engine.safetensors_header import TensorEntry


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


def open_source(
    path: str | Path,
    *,
    model_config: str | Path | None = None,
    state_key: str | None = None,
    ema: bool = False,
) -> Source:
    """Find the weights of `path` and read their headers; no torch for safetensors.

    Args:
        path: a directory, or one .safetensors, .pt, .pth or .bin file.
        model_config: the config.json to use; by default the one beside the weights.
        state_key: which entry of a container holds the weights, dots for levels.
        ema: take the averaged weights of a container that holds both.

    Raises:
        CheckpointError: nothing readable there, a broken file, or a kind that cannot be converted
            (quantised, GGUF, adapters, other families), each with its way out.
    """
    raise NotImplementedError
