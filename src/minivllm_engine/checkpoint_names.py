"""Names of tensors: what a checkpoint may call them, which are refused, and which a model must have.

Canonical names are those of `Qwen3_5ForCausalLM`: `model.layers.0.mlp.up_proj.weight`, `lm_head.weight`.
All matching is by whole dot-separated segments.
"""

import re

from minivllm_engine.model_config import ModelConfig

# Leading segments that producers put before the text model, in any number: `model.language_model.` in
# official files, `model.` in text-only ones, none in bare backbones, and repeated ones after a save bug of
# transformers 5.5.
_WRAPPERS = frozenset({"model", "language_model"})
_SKIPPED_ROOTS = re.compile(r"visual|vision_tower|vision_model|mtp|mtp_.*")

# A segment that betrays a layout which cannot be read, and why.
_REFUSED = (
    (
        r"weight_scale.*|qweight|qzeros|scales|g_idx|input_scale",
        "quantised weights are not supported",
    ),
    (
        r"lora_[AB]|lora_embedding_[AB]",
        "this is a LoRA adapter: merge it into its base model first",
    ),
    (r"experts|shared_expert|shared_expert_gate", "mixture-of-experts models are not supported"),
    (r"f_a_proj|g_a_proj|kv_a_proj_with_mqa", "Kimi Delta Attention is another recurrence"),
    (r"in_proj_qkvz|in_proj_ba", "the fused projections of Qwen3-Next are not supported"),
    (r"[qkv]_conv1d", "separate convolutions for q, k and v (FLA, OLMo-Hybrid) are not supported"),
    (r"ssm_.*", "GGUF names: use the Hugging Face checkpoint that the file was made from"),
    (r"linear_qgkv|self_attention", "Megatron names: export the model to Hugging Face first"),
)
_REFUSED_SEGMENTS = [(re.compile(pattern), reason) for pattern, reason in _REFUSED]

Dims = tuple[tuple[str, int], ...]


def canonical_name(name: str) -> str | None:
    """The canonical name of a tensor, or None where it belongs to the vision or the MTP part.

    A name that is not of this family comes back with its wrappers replaced all the same; whether it is
    one that the model has is for `CheckpointIndex.check` to say.
    """
    segments = name.split(".")
    while len(segments) > 1 and segments[0] in _WRAPPERS:
        segments.pop(0)
    if _SKIPPED_ROOTS.fullmatch(segments[0]):
        return None
    bare = ".".join(segments)
    return bare if segments[0] == "lm_head" else f"model.{bare}"


def refusal(name: str) -> str | None:
    """Why a checkpoint with a tensor of this name cannot be read, or None."""
    for segment in name.split("."):
        for pattern, reason in _REFUSED_SEGMENTS:
            if pattern.fullmatch(segment):
                return reason
    return None


def expected_tensors(config: ModelConfig) -> dict[str, Dims]:
    """Every tensor a model of this shape has, `lm_head.weight` included: canonical name -> its
    dimensions, each as (the config's name for it, size)."""
    vocab, hidden = ("vocab_size", config.vocab_size), ("hidden_size", config.hidden_size)
    tensors: dict[str, Dims] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config.num_hidden_layers):
        prefix = f"model.layers.{i}"
        mixer = _attention(config) if config.is_attention(i) else _gated_deltanet(config)
        part = "self_attn" if config.is_attention(i) else "linear_attn"
        tensors |= {f"{prefix}.{part}.{name}": dims for name, dims in mixer.items()}
        wide = ("intermediate_size", config.intermediate_size)
        tensors |= {
            f"{prefix}.mlp.gate_proj.weight": (wide, hidden),
            f"{prefix}.mlp.up_proj.weight": (wide, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, wide),
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
        }
    return tensors | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def _attention(config: ModelConfig) -> dict[str, Dims]:
    hidden, head = ("hidden_size", config.hidden_size), ("head_dim", config.head_dim)
    q_width = config.num_attention_heads * config.head_dim
    q, kv = (
        ("2 * num_attention_heads * head_dim", 2 * q_width),
        ("num_key_value_heads * head_dim", config.num_key_value_heads * config.head_dim),
    )
    tensors: dict[str, Dims] = {
        "q_proj.weight": (q, hidden),
        "k_proj.weight": (kv, hidden),
        "v_proj.weight": (kv, hidden),
        "o_proj.weight": (hidden, ("num_attention_heads * head_dim", q_width)),
        "q_norm.weight": (head,),
        "k_norm.weight": (head,),
    }
    if config.attention_bias:
        tensors |= {
            f"{name}.bias": tensors[f"{name}.weight"][:1]
            for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        }
    return tensors


def _gated_deltanet(config: ModelConfig) -> dict[str, Dims]:
    hidden, heads = (
        ("hidden_size", config.hidden_size),
        ("linear_num_value_heads", config.linear_num_value_heads),
    )
    value = ("linear_num_value_heads * linear_value_head_dim", config.value_dim)
    conv = ("2 * linear keys + linear values", config.conv_dim)
    return {
        "in_proj_qkv.weight": (conv, hidden),
        "in_proj_z.weight": (value, hidden),
        "in_proj_b.weight": (heads, hidden),
        "in_proj_a.weight": (heads, hidden),
        "conv1d.weight": (
            conv,
            ("1", 1),
            ("linear_conv_kernel_dim", config.linear_conv_kernel_dim),
        ),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (("linear_value_head_dim", config.linear_value_head_dim),),
        "out_proj.weight": (hidden, value),
    }
