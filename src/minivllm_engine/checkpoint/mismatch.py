"""What a checkpoint lacks, has too much, or has in another shape than its config.json asks for."""

import difflib
import json
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from minivllm_engine.checkpoint.names import EMBEDDING, HEAD, bare_name, expected_tensors
from minivllm_engine.checkpoint.safetensors_header import TensorEntry
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape
from minivllm_engine.model_config.config import ModelConfig

MANIFEST = "minivllm_manifest.json"
# How the detail of a tensor in a layer too many begins.
BEYOND = "the config has"
_LAYER = re.compile(r"(?<=\blayers\.)\d+")


def conversion_command(path: Path) -> str:
    """Return the command that makes a loadable checkpoint of `path`."""
    return f"minivllm convert-weights {shlex.quote(str(path))} DST"


def mismatch(
    path: Path, entries: Mapping[str, TensorEntry], config: ModelConfig
) -> CheckpointError | None:
    """Make the error for tensors that are not those of `config`, or return None.

    Args:
        path: the model directory.
        entries: canonical name -> tensor.
    """
    expected = expected_tensors(config)
    if config.tie_word_embeddings and HEAD not in entries:
        del expected[HEAD]
    missing = [name for name in expected if name not in entries]
    unexpected = [name for name in entries if name not in expected]
    misshapen = [
        name
        for name, dims in expected.items()
        if name in entries and entries[name].shape != tuple(size for _, size in dims)
    ]
    if not (missing or unexpected or misshapen):
        return None
    beyond = [name for name in unexpected if is_beyond(bare_name(name).layer, config)]
    others = [name for name in unexpected if name not in set(beyond)]
    lines = _lines("missing", missing, nearest_in=others)
    lines += _lines("unexpected", others, nearest_in=list(expected))
    lines += [f"{line} ({layers_of(config)})" for line in _lines("unexpected", beyond)]
    for name in misshapen:
        sizes, keys = [size for _, size in expected[name]], [key for key, _ in expected[name]]
        found = escape(list(entries[name].shape))
        lines.append(
            f"misshapen: {name} is {found}, config.json asks for {sizes} ({', '.join(keys)})"
        )
    return CheckpointError(
        f"the tensors in {path} are not those that its config.json asks for",
        why="\n".join(lines),
        hint=_hint(path, entries, config, missing, misshapen),
    )


def is_beyond(layer: int | None, config: ModelConfig) -> bool:
    """Say whether it is a layer that the model does not have."""
    return layer is not None and layer >= config.num_hidden_layers


def layers_of(config: ModelConfig) -> str:
    """Return how many layers there are to be, of names that are too many."""
    count = config.num_hidden_layers
    return f"{BEYOND} {count} layers (0-{count - 1})" if count > 1 else f"{BEYOND} 1 layer (0)"


def left_missing(path: Path) -> frozenset[str]:
    """Return the tensors that a conversion to `path` was allowed to do without, as its manifest says."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return frozenset()
    names = manifest.get("missing") if isinstance(manifest, dict) else None
    return frozenset(map(str, names)) if isinstance(names, list) else frozenset()


def _hint(
    path: Path,
    entries: Mapping[str, TensorEntry],
    config: ModelConfig,
    missing: list[str],
    misshapen: list[str],
) -> str:
    shapes = {name: entries[name].shape for name in misshapen}
    convs = [shape for name, shape in shapes.items() if name.endswith("conv1d.weight")]
    if any(shape[2:] == (1,) for shape in convs):
        # [channels, kernel, 1] is how MLX stores them, which also adds 1 to norm weights.
        return f"{conversion_command(path)} (these are weights of an MLX conversion)"
    if any(len(shape) == 2 for shape in convs):
        return "Save convolutions as [channels, 1, kernel]: tensor.unsqueeze(1)."
    if left_missing(path) & set(missing):
        return (
            "It was converted with --allow-missing and is incomplete; convert a source that holds them: "
            f"minivllm convert-weights SRC {shlex.quote(str(path))} --overwrite"
        )
    if missing == [HEAD] and not entries.keys() - expected_tensors(config).keys():
        return (
            'If the output head is the embedding, config.json must say "tie_word_embeddings": true.'
        )
    if EMBEDDING in shapes and shapes[EMBEDDING][1:] == (config.hidden_size,):
        return (
            f"The embedding has {shapes[EMBEDDING][0]} rows, vocab_size is {config.vocab_size}: "
            "use the config.json that came with these weights."
        )
    if (path / MANIFEST).is_file():
        return f"minivllm convert-weights SRC {shlex.quote(str(path))} --check"
    return "Use the config.json that came with these weights, or copy the weights again."


def _lines(kind: str, names: list[str], *, nearest_in: Iterable[str] = ()) -> list[str]:
    """One line for all layers that share a name."""
    layers: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        match = _LAYER.search(name)
        layers[_LAYER.sub("*", name)].append(match[0] if match else "")
    others = sorted({_LAYER.sub("*", name) for name in nearest_in})
    return [
        f"{kind}: {escape(_filled(name, numbers))}{_nearest(name, others)}"
        for name, numbers in layers.items()
    ]


def _filled(pattern: str, numbers: list[str]) -> str:
    return pattern.replace("*", numbers[0] if len(numbers) == 1 else "{" + ",".join(numbers) + "}")


def _nearest(name: str, others: list[str]) -> str:
    close = difflib.get_close_matches(name, others, n=1, cutoff=0.8)
    return f" (nearest: {escape(close[0])})" if close else ""
