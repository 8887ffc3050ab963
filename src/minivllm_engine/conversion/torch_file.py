"""Files of torch.save: mapped, never unpickled beyond tensors, and unwrapped down to the weights.

A key of a container stands as its text: a string as it is, bytes as the UTF-8 in them, anything else as
Python prints it. Levels are joined with dots; where a key has a dot itself, the longest key that fits is
taken. Loads torch: imported only where such a file is opened.
"""

import re
import shlex
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minivllm_engine.checkpoint.safetensors_header import TensorEntry
from minivllm_engine.conversion.torch_archive import FLAT, load_archive
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape, listed


def key_text(key: object) -> str:
    """Write a key as text."""
    if isinstance(key, bytes):
        return key.decode("utf-8", "backslashreplace")
    return str(key)


def level_of(file: Path, level: Mapping[Any, Any]) -> dict[str, Any]:
    """Return one level by the text of its keys.

    Raises:
        CheckpointError: two keys have one text, such as 1 and "1".
    """
    named: dict[str, Any] = {}
    for key, value in level.items():
        text = key_text(key)
        if text in named:
            raise CheckpointError(
                f"{file} holds two entries that are called {escape(text)}",
                why=f"their keys are of different types, one is {escape(repr(key))}",
                hint="Save the weights alone, under strings: torch.save(model.state_dict(), FILE).",
            )
        named[text] = value
    return named


def walk(root: Any, path: tuple[str, ...]) -> Any:
    """Follow `path` to what lies at its end; None where that leads nowhere."""
    level = root
    for text in path:
        if not isinstance(level, Mapping):
            return None
        level = next((value for key, value in level.items() if key_text(key) == text), None)
    return level


def find_weights_key(file: Path, root: Any, state_key: str) -> tuple[str, ...]:
    """Find the path that `state_key` names.

    Raises:
        CheckpointError: it names no dictionary.
    """
    path = next(_paths(root, state_key), None)
    if path is None:
        options = [key_option(root, (key_text(key),)) for key in _dictionaries(root)]
        known = [option for option in options if option]
        raise CheckpointError(
            f"{file} has no container {escape(repr(state_key))}",
            why=f"keys at its first level: {listed(map(key_text, root), 8) or 'none'}"
            if isinstance(root, Mapping)
            else f"it holds no dictionary, but {type(root).__name__}",
            hint=f"One that is there: {' or '.join(known[:3])}"
            if known
            else "Leave --state-key out: there is no container in that file.",
        )
    return path


def key_option(root: Any, path: tuple[str, ...]) -> str | None:
    """Write the `--state-key ...` that leads to `path`, ready for a shell; None where none does."""
    text = ".".join(path)
    if not text or escape(text) != text or next(_paths(root, text), None) != path:
        return None
    return f"--state-key {shlex.quote(text)}"


def _dictionaries(root: Any) -> list[Any]:
    if not isinstance(root, Mapping):
        return []
    return [key for key, value in root.items() if isinstance(value, Mapping)]


def _paths(level: Any, text: str) -> Iterator[tuple[str, ...]]:
    """Every way to read `text` as keys of dictionaries, the longest key first."""
    if not isinstance(level, Mapping):
        return
    inner = [(key_text(key), value) for key, value in level.items() if isinstance(value, Mapping)]
    for key, value in sorted(inner, key=lambda pair: -len(pair[0])):
        if key == text:
            yield (key,)
        elif text.startswith(key + "."):
            for rest in _paths(value, text[len(key) + 1 :]):
                yield (key, *rest)


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

# Levels of dictionaries in which tensors are looked for, and of containers around weights.
_DEEPEST, _DEEPEST_CONTAINER = 4, 16

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
    torch.complex64: "C64",
    torch.complex128: "C128",
}


@dataclass(frozen=True)
class TorchWeights:
    """The weights in a file. entered: keys of the containers around them, outermost first."""

    tensors: dict[str, torch.Tensor]
    entered: tuple[str, ...]


def load_torch_file(
    file: Path,
    *,
    state_key: str | None = None,
    ema: bool = False,
    path: tuple[str, ...] | None = None,
) -> TorchWeights:
    """Map `file` into memory and find its weights; no tensor data is read.

    Args:
        state_key: the container that holds the weights, see `state_keys`.
        ema: take the averaged weights.
        path: `entered` of the same file, where it was opened before.

    Raises:
        CheckpointError: the file is broken or holds more than tensors; two containers at one level.
    """
    root: Any = load_archive(file)
    if path is not None:
        return TorchWeights(_tensors(file, root, walk(root, path), path), path)
    entered = () if state_key is None else find_weights_key(file, root, state_key)
    level, seen = walk(root, entered), set[int]()
    while isinstance(level, Mapping):
        if id(level) in seen or len(entered) > _DEEPEST_CONTAINER:
            raise CheckpointError(
                f"{file} holds a dictionary that holds itself, or very many",
                why=f"under {escape('.'.join(entered))}",
                hint=FLAT,
            )
        seen.add(id(level))
        named = level_of(file, level)
        container = _container(file, root, named, entered, ema=ema)
        if container is None:
            break
        _refuse_weights_beside(file, root, named, (*entered, container))
        level, entered = named[container], (*entered, container)
    if ema and not any(key in AVERAGED for key in entered):
        raise CheckpointError(
            f"{file} holds no averaged weights",
            why=f"looked for {', '.join(AVERAGED)}",
            hint="Leave --ema out, or say where they are in its place: --state-key KEY.",
        )
    return TorchWeights(_tensors(file, root, level, entered), entered)


def torch_entries(file: Path, weights: TorchWeights) -> list[TensorEntry]:
    """Return the tensors of `weights` as entries, without a place in the file."""
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


def _refuse_weights_beside(
    file: Path, root: Any, level: Mapping[str, Any], entered: tuple[str, ...]
) -> None:
    """Tensors at the level of a container, or in other parts there, would be lost without a word."""
    container = entered[-1]
    beside = [
        key
        for key, value in level.items()
        if key != container
        and key not in AVERAGED
        and key not in CONTAINERS
        and not _BESIDE.search(key)
        and _holds_tensors(value)
    ]
    if beside:
        option = key_option(root, entered)
        raise CheckpointError(
            f"{file} holds tensors beside {container!r}: {listed(beside)}",
            why="one dictionary is converted, and what is outside it would be lost",
            hint=f"Save all weights in one dictionary, or leave the others out: {option}"
            if option
            else FLAT,
        )


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(part, torch.Tensor) for _, part in _parts(value))


def _parts(root: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each object inside dictionaries, once, with the first path to it."""
    seen: set[int] = set()
    left: deque[tuple[tuple[str, ...], Any]] = deque([((), root)])
    while left:
        path, value = left.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield path, value
        if isinstance(value, Mapping) and len(path) < _DEEPEST:
            left.extend(((*path, key_text(key)), part) for key, part in value.items())


def _container(
    file: Path, root: Any, level: Mapping[str, Any], entered: tuple[str, ...], *, ema: bool
) -> str | None:
    averaged = [key for key in AVERAGED if isinstance(level.get(key), Mapping)]
    found = (
        averaged
        if ema and averaged
        else [key for key in CONTAINERS if isinstance(level.get(key), Mapping)]
    )
    if len(found) > 1:
        options = [option for key in found if (option := key_option(root, (*entered, key)))]
        raise CheckpointError(
            f"{file} holds {len(found)} sets of weights: {', '.join(found)}",
            why="one is converted, and nothing tells which: they have "
            + " and ".join(f"{len(level[key]):,}" for key in found)
            + " entries",
            hint=f"Say which one: {options[0]}" if options else FLAT,
        )
    return found[0] if found else None


def _tensors(
    file: Path, root: Any, level: Any, entered: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    if not isinstance(level, Mapping):
        raise CheckpointError(
            f"{file} holds no dictionary of tensors", why=f"but {type(level).__name__}", hint=FLAT
        )
    named = level_of(file, level)
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise CheckpointError(
            f"{file} holds no tensor at the level where weights were looked for",
            why=f"its keys: {listed(named, 8) or 'none'}",
            hint=_where_tensors_are(root, entered),
        )
    nested = [
        name
        for name, value in named.items()
        if isinstance(value, Mapping) and not _BESIDE.search(name) and _holds_tensors(value)
    ]
    if nested:
        raise CheckpointError(
            f"{file} holds further tensors inside {listed(nested)}",
            why="beside tensors, which are taken for the weights",
            hint=FLAT,
        )
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise CheckpointError(
                f"{file}: {escape(name)} has no data",
                why=f"it is on the meta device: a shape {list(tensor.shape)} whose values were never loaded",
                hint="Save the checkpoint again once its weights are loaded.",
            )
        if tensor.layout != torch.strided or tensor.is_quantized:
            kind = "quantised" if tensor.is_quantized else "sparse"
            raise CheckpointError(
                f"{file}: {escape(name)} is a {kind} tensor",
                why=f"it is stored as {tensor.dtype} in {tensor.layout}, and no rows can be cut from that",
                hint="Save it as a plain one: "
                + ("tensor.dequantize()." if tensor.is_quantized else "tensor.to_dense()."),
            )
    return {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in tensors.items()}


def _where_tensors_are(root: Any, entered: tuple[str, ...]) -> str:
    """The option that names the dictionary with the most tensors, if there is one and it can be named."""
    held = []
    for path, level in _parts(root):
        if isinstance(level, Mapping) and path != entered and not any(map(_BESIDE.search, path)):
            count = sum(isinstance(value, torch.Tensor) for value in level.values())
            held += [(count, path)] if count else []
    options = [key_option(root, path) for _, path in sorted(held, reverse=True)]
    option = next((option for option in options if option), None)
    return f"Say where the weights are: {option}" if option else FLAT
