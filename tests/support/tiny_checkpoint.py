"""Checkpoints of random weights, in every layout that producers write.

The weights are random, but not as a library initialises them: there the state fades within a token or
two, and a test cannot see that one was lost. Here A_log lies in [-2, 1], dt_bias around -1, and every
norm weight is off its neutral value, so that the state lasts.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

OFFICIAL, TEXT, BARE, NESTED_TWICE = (
    "model.language_model.",
    "model.",
    "",
    "model.language_model.language_model.",
)


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A flat config.json of 4 layers, 3 of them DeltaNet; twice as many value as key heads, dk != dv."""
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "float32",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config |= changes
    if "layer_types" not in config:
        every = config["full_attention_interval"]
        config["layer_types"] = [
            "linear_attention" if (i + 1) % every else "full_attention"
            for i in range(config["num_hidden_layers"])
        ]
    return config


def nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same config as official files have it."""
    text = {k: v for k, v in config.items() if k != "architectures"}
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": config["tie_word_embeddings"],
    }


def random_tensors(
    config: Mapping[str, Any], *, prefix: str = TEXT, seed: int = 0, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """All tensors of a flat config, fp32, under the names that `prefix` makes of them.

    device: where they are drawn, and stay. Numbers of one seed differ between devices.
    """
    generator = torch.Generator(device).manual_seed(seed)
    on = {"generator": generator, "device": device}
    tensors: dict[str, torch.Tensor] = {}

    def matrix(name: str, *shape: int, std: float | None = None) -> None:
        std = shape[-1] ** -0.5 if std is None else std
        tensors[name] = torch.randn(*shape, **on) * std

    def vector(name: str, size: int, mean: float = 0.0, std: float = 0.3) -> None:
        tensors[name] = mean + std * torch.randn(size, **on)

    hidden, wide = config["hidden_size"], config["intermediate_size"]
    tied = config["tie_word_embeddings"]
    matrix("embed_tokens.weight", config["vocab_size"], hidden, std=hidden**-0.5 if tied else 1.0)
    for i, kind in enumerate(config["layer_types"]):
        layer = f"layers.{i}."
        if kind == "linear_attention":
            keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
            heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
            channels = 2 * keys + heads * value_dim
            part = layer + "linear_attn."
            matrix(part + "in_proj_qkv.weight", channels, hidden)
            matrix(part + "in_proj_z.weight", heads * value_dim, hidden)
            matrix(part + "in_proj_b.weight", heads, hidden)
            matrix(part + "in_proj_a.weight", heads, hidden)
            matrix(part + "conv1d.weight", channels, 1, config["linear_conv_kernel_dim"], std=0.5)
            matrix(part + "out_proj.weight", hidden, heads * value_dim)
            tensors[part + "A_log"] = torch.rand(heads, **on) * 3 - 2
            vector(part + "dt_bias", heads, mean=-1.0, std=0.7)
            vector(part + "norm.weight", value_dim, mean=1.0)
        else:
            head_dim = config["head_dim"]
            width = config["num_attention_heads"] * head_dim
            narrow = config["num_key_value_heads"] * head_dim
            part = layer + "self_attn."
            for name, rows in (("q", 2 * width), ("k", narrow), ("v", narrow)):
                matrix(f"{part}{name}_proj.weight", rows, hidden)
            matrix(part + "o_proj.weight", hidden, width)
            if config["attention_bias"]:
                for name, size in (("q", 2 * width), ("k", narrow), ("v", narrow), ("o", hidden)):
                    vector(f"{part}{name}_proj.bias", size)
            vector(part + "q_norm.weight", head_dim)
            vector(part + "k_norm.weight", head_dim)
        matrix(layer + "mlp.gate_proj.weight", wide, hidden)
        matrix(layer + "mlp.up_proj.weight", wide, hidden)
        matrix(layer + "mlp.down_proj.weight", hidden, wide)
        vector(layer + "input_layernorm.weight", hidden)
        vector(layer + "post_attention_layernorm.weight", hidden)
    vector("norm.weight", hidden)
    named = {prefix + name: tensor for name, tensor in tensors.items()}
    if not tied:
        matrix("lm_head.weight", config["vocab_size"], hidden)
        named["lm_head.weight"] = tensors["lm_head.weight"]
    return named


def official_dtypes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """BF16, but A_log and the DeltaNet norm F32, as in official files."""
    return {
        name: tensor if name.endswith(("A_log", "linear_attn.norm.weight")) else tensor.bfloat16()
        for name, tensor in tensors.items()
    }


def write_checkpoint(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    shards: int = 1,
) -> Path:
    """Write config.json and the tensors, in one file or in several with an index. Returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(dict(tensors), path / "model.safetensors")
        return path
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        some = names[i::shards]
        save_file({name: tensors[name] for name in some}, path / file)
        weight_map |= dict.fromkeys(some, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def write_tiny_checkpoint(path: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint of `tiny_config(**changes)` in the plain text layout."""
    config = tiny_config(**changes)
    return write_checkpoint(path, config, random_tensors(config, seed=seed))
