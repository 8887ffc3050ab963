"""Filling a model with its weights, wherever they come from."""

from collections.abc import Callable

import torch

from minivllm_engine.checkpoint.index import CheckpointIndex
from minivllm_engine.checkpoint.random_weights import RandomWeights
from minivllm_engine.models.miniqwen import MiniQwenForCausalLM
from minivllm_engine.runner.load_checkpoint import load_weights


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
