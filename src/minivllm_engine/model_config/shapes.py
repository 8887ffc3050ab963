"""Shapes of the published dense models of the family, as their config.json would have them."""

from typing import Any

# Hidden size, MLP width, layers, query heads, KV heads, DeltaNet value heads, is the head the embedding?
_SIZES = {
    "0.8b": (1024, 3584, 24, 8, 2, 16, True),
    "2b": (2048, 6144, 24, 8, 2, 16, True),
    "4b": (2560, 9216, 32, 16, 4, 32, True),
    "9b": (4096, 12288, 32, 16, 4, 32, False),
    "27b": (5120, 17408, 64, 24, 4, 48, False),
}
SHAPES = tuple(_SIZES)


def shape_config(name: str) -> dict[str, Any]:
    """Return the text config of Qwen3.5 in the size `name`, one of SHAPES.

    Sizes are those of the published checkpoints. It has no end token: a model of random weights
    would stop anywhere.
    """
    hidden, wide, layers, heads, kv_heads, value_heads, tied = _SIZES[name]
    return {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "mamba_ssm_dtype": "float32",
        "vocab_size": 248320,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "full_attention_interval": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "attention_bias": False,
        "attn_output_gate": True,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "tie_word_embeddings": tied,
    }
