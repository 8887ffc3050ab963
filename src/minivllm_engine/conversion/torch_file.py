"""Files of torch.save: mapped, never unpickled beyond tensors, and unwrapped down to the weights.

Loads torch: imported only where such a file is opened.
"""

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minivllm_engine.errors import CheckpointError
from minivllm_engine.safetensors_header import LFS_POINTER, TensorEntry, git_lfs_pointer

# Keys under which trainers keep the weights, and those of averaged weights.
CONTAINERS = (
    "model_state_dict",
    "state_dict",
    "model",
    "module",
    "model_state",
    "net",
    "weights",
    "params",
)
AVERAGED = ("ema", "model_ema", "ema_state_dict")

# What trainers keep beside the weights, and no model needs.
_BESIDE = re.compile(
    r"optim|sched|lr_|scaler|rng|random|epoch|step|loss|args|config|value_state_dict"
)

# The words that safetensors has for number types; those of no float are there to be refused by name.
DTYPE_WORDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TorchWeights:
    """The weights in a file. entered: keys of the containers around them, outermost first."""

    tensors: dict[str, torch.Tensor]
    entered: tuple[str, ...]


def load_torch_file(file: Path, *, state_key: str | None = None, ema: bool = False) -> TorchWeights:
    """Map `file` into memory and find its weights; no tensor data is read.

    Args:
        state_key: the container that holds the weights, dots for levels.
        ema: take the averaged weights.

    Raises:
        CheckpointError: the file is broken or holds more than tensors; two containers at one level.
    """
    level: Any = _load(file)
    entered: list[str] = []
    for key in state_key.split(".") if state_key else ():
        if not isinstance(level, Mapping) or not isinstance(level.get(key), Mapping):
            keys = ", ".join(map(str, level)) if isinstance(level, Mapping) else "none"
            raise CheckpointError(
                f"{file} has no container {state_key!r}", why=f"keys at this level: {keys[:300]}"
            )
        level = level[key]
        entered.append(key)
    while isinstance(level, Mapping):
        container = _container(file, level, ema=ema)
        if container is None:
            break
        _refuse_weights_beside(file, level, container)
        level = level[container]
        entered.append(container)
    if ema and not any(key in AVERAGED for key in entered):
        raise CheckpointError(
            f"{file} holds no averaged weights", why=f"looked for {', '.join(AVERAGED)}"
        )
    return TorchWeights(_tensors(file, level), tuple(entered))


def torch_entries(file: Path, weights: TorchWeights) -> list[TensorEntry]:
    """The tensors of `weights` as entries, without a place in the file."""
    return [
        TensorEntry(
            file,
            name,
            DTYPE_WORDS.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")),
            tuple(tensor.shape),
            0,
            tensor.numel() * tensor.element_size(),
        )
        for name, tensor in weights.tensors.items()
    ]


def _load(file: Path) -> Any:
    try:
        with file.open("rb") as stream:
            start = stream.read(len(LFS_POINTER))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read", why=error.strerror) from None
    if start == LFS_POINTER:
        raise git_lfs_pointer(file)
    if start[:2] != b"PK":
        raise CheckpointError(
            f"{file} is not a file of torch.save",
            why=f"it has {file.stat().st_size:,} bytes and does not start as one",
            hint="Copy the file again; one from before torch 1.6 is to be saved again.",
        )
    try:
        return torch.load(file, weights_only=True, mmap=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} holds Python objects beside tensors, which are never loaded",
            why=_object_named_in(str(error)),
            hint="Save the weights alone: torch.save(model.state_dict(), FILE).",
        ) from None
    except (RuntimeError, ValueError, EOFError, OSError, KeyError) as error:
        raise CheckpointError(
            f"{file} is truncated or broken",
            why=str(error).split("\n")[0],
            hint="Copy the file again from where it came from.",
        ) from None


def _object_named_in(text: str) -> str | None:
    # torch's own text tells how to load the file nevertheless, which runs what is in it.
    named = re.search(r"GLOBAL ([\w.]+)", text)
    return None if named is None else f"it names {named[1]}"


def _refuse_weights_beside(file: Path, level: Mapping[Any, Any], container: str) -> None:
    """Tensors at the level of a container, or in other parts there, would be lost without a word."""
    beside = [
        str(key)
        for key, value in level.items()
        if key != container
        and key not in AVERAGED
        and key not in CONTAINERS
        and not _BESIDE.search(str(key))
        and _holds_tensors(value)
    ]
    if beside:
        raise CheckpointError(
            f"{file} holds tensors beside {container!r}: {', '.join(beside)[:300]}",
            why="one dictionary is converted, and what is outside it would be lost",
            hint="Save all weights in one dictionary, or leave the others out: "
            f"--state-key {container}",
        )


def _holds_tensors(value: Any, depth: int = 4) -> bool:
    if isinstance(value, Mapping) and depth:
        return any(_holds_tensors(part, depth - 1) for part in value.values())
    return isinstance(value, torch.Tensor)


def _container(file: Path, level: Mapping[Any, Any], *, ema: bool) -> str | None:
    averaged = [key for key in AVERAGED if isinstance(level.get(key), Mapping)]
    found = (
        averaged
        if ema and averaged
        else [key for key in CONTAINERS if isinstance(level.get(key), Mapping)]
    )
    if len(found) > 1:
        raise CheckpointError(
            f"{file} holds {len(found)} sets of weights: {', '.join(found)}",
            hint=f"Say which one: --state-key {found[0]}",
        )
    return found[0] if found else None


def _tensors(file: Path, level: Any) -> dict[str, torch.Tensor]:
    if not isinstance(level, Mapping):
        raise CheckpointError(
            f"{file} holds no dictionary of tensors",
            why=f"but {type(level).__name__}",
            hint="Save the weights alone: torch.save(model.state_dict(), FILE).",
        )
    tensors = {str(name): value for name, value in level.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        keys = ", ".join(map(str, level))
        raise CheckpointError(
            f"{file} holds no tensor at the level where weights were looked for",
            why=f"its keys: {keys[:300]}",
            hint="Say where the weights are: --state-key KEY",
        )
    nested = [
        str(name)
        for name, value in level.items()
        if isinstance(value, Mapping) and not _BESIDE.search(str(name)) and _holds_tensors(value)
    ]
    if nested:
        raise CheckpointError(
            f"{file} holds further tensors inside {', '.join(nested)[:300]}",
            why="beside tensors, which are taken for the weights",
            hint="Save all weights in one flat dictionary: torch.save(model.state_dict(), FILE).",
        )
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise CheckpointError(
                f"{file}: {name} has no data: it is on the meta device",
                hint="Save the checkpoint again once its weights are loaded.",
            )
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise CheckpointError(
                f"{file}: {name} is a sparse or quantised tensor",
                hint="Save it as a plain one: tensor.to_dense() or tensor.dequantize().",
            )
    return {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in tensors.items()}
