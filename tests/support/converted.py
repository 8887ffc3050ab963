"""Conversions in tests: one call from a source to logits, and layouts of other producers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from minivllm_engine.conversion import ConvertOptions, Report, convert, open_source, plan_conversion
from support.packed_runner import PackedRunner, load_model

IDS = [5, 300, 17, 17, 0, 219, 8, 64, 1, 77, 131, 9]

Tensors = dict[str, torch.Tensor]


def convert_to(
    src: Path,
    dst: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    verify: str = "full",
    opening: Mapping[str, Any] | None = None,
    progress: Callable[..., None] | None = None,
    **options: Any,
) -> Report:
    """Open, plan and convert; every written value is compared with the source."""
    source = open_source(src, **(opening or {}))
    plan = plan_conversion(source, ConvertOptions(**options), dst=dst)
    return convert(plan, dst, resume=resume, overwrite=overwrite, verify=verify, progress=progress)


def engine_logits(path: Path, ids: list[int] = IDS) -> torch.Tensor:
    """[T, vocab_size] of a converted checkpoint, by this engine."""
    return PackedRunner(load_model(path)).run(ids).all_logits


def files_of(path: Path) -> dict[str, bytes]:
    """Everything in a converted directory but the manifest, which names times and places."""
    return {
        file.name: file.read_bytes()
        for file in path.iterdir()
        if file.name != "minivllm_manifest.json"
    }


def qkvz_interleaved(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Canonical tensors with the fused projections of Qwen3-Next: rows of a key head lie together."""
    return _fused(tensors, config, interleaved=True)


def qkvz_concat(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """The same names over plain concatenation, as in vLLM."""
    return _fused(tensors, config, interleaved=False)


def _fused(tensors: Tensors, config: Mapping[str, Any], *, interleaved: bool) -> Tensors:
    heads = config["linear_num_key_heads"]
    keys = heads * config["linear_key_head_dim"]

    def joined(*parts: torch.Tensor) -> torch.Tensor:
        if not interleaved:
            return torch.cat(parts)
        by_head = [part.reshape(heads, -1, part.shape[-1]) for part in parts]
        return torch.cat(by_head, dim=1).flatten(0, 1)

    out = {}
    for name, tensor in tensors.items():
        prefix = name.rsplit("in_proj_", 1)[0]
        if name.endswith("in_proj_qkv.weight"):
            q, k, v = tensor.split([keys, keys, tensor.shape[0] - 2 * keys])
            z = tensors[prefix + "in_proj_z.weight"]
            out[prefix + "in_proj_qkvz.weight"] = joined(q, k, v, z)
        elif name.endswith("in_proj_b.weight"):
            out[prefix + "in_proj_ba.weight"] = joined(tensor, tensors[prefix + "in_proj_a.weight"])
        elif not name.endswith(("in_proj_z.weight", "in_proj_a.weight")):
            out[name] = tensor
    return out


def q_gate_halves(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """q_proj as [all queries | all gates]."""
    out = dict(tensors)
    for name in tensors:
        if name.endswith(("q_proj.weight", "q_proj.bias")):
            out[name] = torch.cat(_queries_and_gates(tensors[name], config))
    return out


def q_gate_separate(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Queries and gates in matrices of their own."""
    out = dict(tensors)
    for name in tensors:
        if name.endswith(("q_proj.weight", "q_proj.bias")):
            query, gate = _queries_and_gates(tensors[name], config)
            out[name] = query
            out[name.replace("q_proj", "q_gate_proj")] = gate
    return {name: tensor.contiguous() for name, tensor in out.items()}


def _queries_and_gates(
    q_proj: torch.Tensor, config: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, size = config["num_attention_heads"], config["head_dim"]
    by_head = q_proj.reshape(heads, 2, size, *q_proj.shape[1:])
    return by_head[:, 0].flatten(0, 1), by_head[:, 1].flatten(0, 1)


def qkv_fused(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Attention's q (with its gates), k and v in one matrix."""
    out = {}
    for name, tensor in tensors.items():
        prefix, _, part = name.rpartition("self_attn.")
        if part in ("q_proj.weight", "q_proj.bias"):
            kind = part.removeprefix("q_proj.")
            parts = [tensors[f"{prefix}self_attn.{letter}_proj.{kind}"] for letter in "qkv"]
            out[f"{prefix}self_attn.qkv_proj.{kind}"] = torch.cat(parts)
        elif not part.startswith(("k_proj.", "v_proj.")):
            out[name] = tensor
    return out


def run_time_names(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """An engine's own names: every mixer is `mixer`, gate and up are one matrix."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate_proj.weight"):
            up = tensors[name.replace("gate_proj", "up_proj")]
            out[name.replace("gate_proj", "gate_up_proj")] = torch.cat([tensor, up])
        elif not name.endswith("mlp.up_proj.weight"):
            out[name.replace("linear_attn", "mixer").replace("self_attn", "mixer")] = tensor
    return out


def in_proj_fused(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """All projections of a DeltaNet in one matrix [q | k | v | z | b | a]."""
    out = {}
    for name, tensor in tensors.items():
        prefix, _, part = name.rpartition("linear_attn.")
        prefix += "linear_attn."
        if part == "in_proj_qkv.weight":
            parts = [tensors[f"{prefix}in_proj_{p}.weight"] for p in ("qkv", "z", "b", "a")]
            out[prefix + "in_proj.weight"] = torch.cat(parts)
        elif part == "norm.weight":
            out[prefix + "out_norm.weight"] = tensor
        elif not part.startswith("in_proj_"):
            out[name] = tensor
    return out


def mlx_export(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """As mlx-lm 0.32 writes them: the convolution's axis moved, 1 added to every norm but the DeltaNet's."""
    shifted = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("conv1d.weight"):
            out[name] = tensor.movedim(2, 1).contiguous()
        else:
            out[name] = tensor + 1 if name.endswith(shifted) else tensor
    return out
