"""The weights in the official Qwen3.5 layout."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

PREFIX = "model.language_model."

KEPT_IN_FP32 = ("linear_attn.A_log", "linear_attn.norm.weight")


def export_weights(model: nn.Module, out: Path) -> Path:
    """BF16, but A_log and the gated norm stay F32; the tied head is not written."""
    tensors = {}
    for name, value in model.state_dict().items():
        dtype = torch.float32 if name.endswith(KEPT_IN_FP32) else torch.bfloat16
        tensors[PREFIX + name] = value.to("cpu", dtype).contiguous()
    path = out / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """As fp32, under the names of the model."""
    weights = load_file(checkpoint / "model.safetensors")
    return {name.removeprefix(PREFIX): value.float() for name, value in weights.items()}
