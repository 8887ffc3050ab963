"""Reading the tensors of a checkpoint into a model."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from minivllm_engine.checkpoint.index import CheckpointIndex
from minivllm_engine.checkpoint.safetensors_header import TensorEntry
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape
from minivllm_engine.models.miniqwen import MiniQwenForCausalLM

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
