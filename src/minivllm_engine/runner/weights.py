"""Filling a model with its weights, wherever they come from."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from minivllm_engine.checkpoint.index import CheckpointIndex
from minivllm_engine.checkpoint.random_weights import RandomWeights
from minivllm_engine.checkpoint.safetensors_header import TensorEntry
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape
from minivllm_engine.models.miniqwen import MiniQwenForCausalLM


def fill_weights(
    model: MiniQwenForCausalLM,
    source: CheckpointIndex | RandomWeights,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Read or draw every weight of `model`.

    Args:
        progress: called with ("weights", bytes done, bytes in all) after each tensor.

    Raises:
        CheckpointError: as `load_weights`.
    """
    if isinstance(source, CheckpointIndex):
        load_weights(model, source, progress=progress)
    else:
        _draw_weights(model, source.seed, progress)


def _draw_weights(
    model: MiniQwenForCausalLM, seed: int, progress: Callable[[str, int, int], None] | None
) -> None:
    """Draw on the model's device. One seed gives the same weights on one kind of device.

    Logits get a standard deviation of about 1. Decays, gates and norms are not at their neutral values:
    the states then carry what came before, as they do in a trained model.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    views = model.checkpoint_views()
    total = sum(view.nbytes for view in views.values())
    done = 0
    for name, view in views.items():
        if name.endswith("A_log"):
            view.uniform_(-2, 1, generator=generator)
        else:
            mean, deviation = _normal(name, view, tied=model.head is model.embedding)
            view.normal_(mean, deviation, generator=generator)
        done += view.nbytes
        if progress is not None:
            progress("weights", done, total)


def _normal(name: str, view: torch.Tensor, *, tied: bool) -> tuple[float, float]:
    """Mean and standard deviation of a tensor's numbers."""
    if name.endswith("dt_bias"):
        return -1.0, 0.7
    if name.endswith(
        "linear_attn.norm.weight"
    ):  # a plain factor; other norms multiply by 1 + weight
        return 1.0, 0.3
    if name.endswith("norm.weight") or name.endswith("layernorm.weight"):
        return 0.0, 0.3
    if name.endswith("conv1d.weight"):
        return 0.0, 0.5
    if name.endswith("embed_tokens.weight") and not tied:
        return 0.0, 1.0
    return 0.0, float(view.shape[-1]) ** -0.5


# Types that are computed in, and have more room than fp16.
_WIDE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load_weights(
    model: MiniQwenForCausalLM,
    index: CheckpointIndex,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Fill every weight of `model`, tensor by tensor, converting to the dtype that it has there.

    Args:
        model: of the shape of the checkpoint's config. A head that is to be its embedding, by
            `CheckpointIndex.is_tied`, becomes it.
        index: the checkpoint; is checked against the model's config first.
        progress: called with ("weights", bytes read, bytes in all) after each tensor.

    Raises:
        CheckpointError: missing, unexpected or misshapen tensors, or values that are not finite, or
            not once they are cast.
    """
    index.check(model.config)
    model.set_tied(index.is_tied(model.config))
    views = model.checkpoint_views()
    by_file: defaultdict[Path, list[str]] = defaultdict(list)
    for name in views:
        by_file[index.entries[name].file].append(name)
    total = sum(index.entries[name].num_bytes for name in views)
    done = 0
    for file, names in by_file.items():
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in names:
                entry, view = index.entries[name], views[name]
                tensor = tensors.get_tensor(entry.name)
                view.copy_(tensor.view(view.shape))
                if not _is_finite(view):
                    raise _not_finite(entry, tensor, view.dtype)
                done += entry.num_bytes
                if progress is not None:
                    progress("weights", done, total)


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def _count_not_finite(tensor: torch.Tensor) -> int:
    return int((~tensor.isfinite()).sum())


def _not_finite(entry: TensorEntry, stored: torch.Tensor, dtype: torch.dtype) -> CheckpointError:
    name = f"{entry.file}: {escape(entry.name)}"
    if not _is_finite(stored):
        return CheckpointError(
            f"{name} holds values that are not finite",
            why=f"{_count_not_finite(stored):,} of {stored.numel():,} are NaN or infinite",
            hint="Use a checkpoint whose training had not failed, or copy the file again.",
        )
    word, largest = str(dtype).removeprefix("torch."), float(stored.double().abs().max())
    roomy = [short for short, wide in _WIDE.items() if wide != dtype and _holds(wide, largest)]
    return CheckpointError(
        f"{name} holds values that are not finite as {word}",
        why=f"up to {largest:.3g} as {entry.dtype}, {torch.finfo(dtype).max:.3g} is the most that {word} "
        "holds",
        hint=" or ".join(f"--dtype {short}" for short in roomy)
        or f"Clamp this tensor, or scale it down where it was made: no dtype has room for {largest:.3g}, and "
        "nothing wider than fp32 is computed in.",
    )


def _holds(dtype: torch.dtype, value: float) -> bool:
    return bool(torch.tensor(value, dtype=torch.float64).to(dtype).isfinite())
