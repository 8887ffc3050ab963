"""The config.json of the target: nested, complete, in one spelling, whatever the source's looked like."""

import math
from collections.abc import Mapping
from typing import Any

from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape
from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.model_config.reader import ConfigReader, refuse_foreign

# No reader of the family knows fp64 as the type of a model.
_LONG_DTYPES = {"fp64": "float32", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

# Keys carried over as they are, where they are set.
_KEPT = (
    "max_position_embeddings",
    "mamba_ssm_dtype",
    "initializer_range",
    "attention_dropout",
    "use_cache",
    "bos_token_id",
    "pad_token_id",
)
_MOE_KEYS = (
    "num_experts",
    "num_experts_per_tok",
    "decoder_sparse_step",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "mlp_only_layers",
    "norm_topk_prob",
    "router_aux_loss_coef",
    "output_router_logits",
)
_NO_ATTENTION = (
    "FLA's attention layers have no output gate, usually no q and k norm, and rotate whole heads: they "
    "cannot be expressed as attention of this family"
)


def adapt_config(content: Mapping[str, Any], source: str, styles: frozenset[str]) -> dict[str, Any]:
    """Make a config that `ModelConfig` reads from that of another producer.

    Raises:
        CheckpointError: a setting of Flash Linear Attention that this family has not, or a config that
            says to be one of another architecture.
    """
    text = content.get("text_config", content)
    if "fla" in styles and isinstance(text, Mapping) and "linear_num_key_heads" not in text:
        return _from_fla(content, source)
    if content.get("model_type") == "qwen3_next":
        # Only its dense form comes here: experts are refused by the names of their tensors.
        dense = {key: value for key, value in content.items() if key not in _MOE_KEYS}
        return {**dense, "model_type": "qwen3_5_text"}
    return dict(content)


def target_config(
    adapted: Mapping[str, Any], config: ModelConfig, source: str, *, tied: bool, dtype: str
) -> dict[str, Any]:
    """Make the content of the target's config.json.

    Args:
        adapted: from `adapt_config`; config: the same, read.
        tied: the head is the embedding.
        dtype: of most of the weights, "fp32", "bf16", "fp16" or "fp64".
    """
    reader = ConfigReader(adapted, source)
    text: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "dtype": _LONG_DTYPES[dtype],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "layer_types": list(config.layer_types),
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "attention_bias": config.attention_bias,
        "attn_output_gate": True,
        "hidden_act": "silu",
        "linear_num_key_heads": config.linear_num_key_heads,
        "linear_num_value_heads": config.linear_num_value_heads,
        "linear_key_head_dim": config.linear_key_head_dim,
        "linear_value_head_dim": config.linear_value_head_dim,
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": _rope_parameters(reader, config),
        "tie_word_embeddings": tied,
    }
    text |= {key: reader.get(key) for key in _KEPT if reader.get(key) is not None}
    ids = list(config.eos_token_ids)
    if ids:
        text["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": tied,
    }


def _rope_parameters(reader: ConfigReader, config: ModelConfig) -> dict[str, Any]:
    given = reader.get("rope_scaling")
    given = dict(reader.get("rope_parameters") or {} if given is None else given)
    given.pop("type", None)
    theta = given.get("rope_theta")
    theta = reader.get("rope_theta") if theta is None else theta
    rope = {
        **given,
        "rope_type": config.rope.rope_type,
        "partial_rotary_factor": config.rope.partial_rotary_factor,
    }
    # A theta that the source does not have stays absent, so that every reader warns of its default.
    return rope if theta is None else {**rope, "rope_theta": theta}


def _from_fla(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    reader = ConfigReader(content, source)
    refuse_foreign(reader)
    _refuse_fla_settings(reader)
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "head_dim")
    missing = [key for key in needed if content.get(key) is None]
    if missing:
        raise CheckpointError(
            f"{source} has no {', '.join(missing)}",
            why="the tensors are those of Flash Linear Attention's Gated DeltaNet",
            hint="Use the config.json that was saved with these weights.",
        )
    hidden, heads, head_dim = (
        reader.integer(key, content[key]) for key in ("hidden_size", "num_heads", "head_dim")
    )
    expand = reader.number("expand_v", _or(content.get("expand_v"), 2.0))
    layers = reader.integer("num_hidden_layers", content["num_hidden_layers"])
    kept = {key: content[key] for key in (*_KEPT, "dtype", "torch_dtype") if key in content}
    return kept | {
        "model_type": "qwen3_5_text",
        "vocab_size": content["vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": _fla_intermediate_size(reader, hidden),
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention"] * layers,
        # No layer is attention: these describe nothing, but readers of the family ask for them.
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": _or(content.get("num_v_heads"), heads),
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": int(head_dim * expand),
        "linear_conv_kernel_dim": _or(content.get("conv_size"), 4),
        "rms_norm_eps": _or(content.get("norm_eps"), 1e-6),
        "tie_word_embeddings": bool(content.get("tie_word_embeddings")),
        "eos_token_id": content.get("eos_token_id"),
    }


def _fla_intermediate_size(reader: ConfigReader, hidden: int) -> int:
    given = reader.get("intermediate_size")
    if given is not None:
        return reader.integer("intermediate_size", given)
    ratio = reader.number("hidden_ratio", _or(reader.get("hidden_ratio"), 4))
    return 256 * math.ceil(int(hidden * ratio * 2 / 3) / 256)


def _refuse_fla_settings(reader: ConfigReader) -> None:
    if reader.get("attn") is not None:
        raise CheckpointError(
            f"{reader.source}: attn is set",
            why=_NO_ATTENTION,
            hint="Only models whose layers are all Gated DeltaNet can be converted from FLA.",
        )
    wrong = (
        ("allow_neg_eigval", reader.get("allow_neg_eigval") is True, "negative eigenvalues"),
        ("use_gate", reader.get("use_gate") is False, "an output without a gate"),
        ("use_short_conv", reader.get("use_short_conv") is False, "no convolution"),
        ("conv_bias", reader.get("conv_bias") is True, "a convolution with a bias"),
        ("attnres_block_size", reader.get("attnres_block_size") is not None, "attention residuals"),
        (
            "output_gate_activation",
            reader.get("output_gate_activation") not in (None, "swish", "silu"),
            "another activation of the output gate",
        ),
        (
            "hidden_act",
            reader.get("hidden_act") not in (None, "swish", "silu"),
            "another activation",
        ),
    )
    for key, is_wrong, what in wrong:
        if is_wrong:
            raise CheckpointError(
                f"{reader.source}: {key} is {escape(repr(reader.get(key)))}",
                why=f"{what}: Gated DeltaNet layers of this family have no such thing",
                hint="Use a model that was trained without it.",
            )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
