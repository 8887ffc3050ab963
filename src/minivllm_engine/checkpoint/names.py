"""Names of tensors: what a checkpoint may call them, which are refused, and which a model must have.

Canonical names are those of `Qwen3_5ForCausalLM`: `model.layers.0.mlp.up_proj.weight`, `lm_head.weight`.
All matching is by whole dot-separated segments.
"""

import re
from dataclasses import dataclass

from minivllm_engine.checkpoint.rules import (
    CANONICAL,
    FOREIGN,
    REFUSED,
    ROOTS,
    SKIPPED,
    WRAPPERS,
    Refusal,
)
from minivllm_engine.model_config.config import ModelConfig

_SKIPPED = [(skip.rule, re.compile(rf"(?:{skip.pattern})(?:\.|$)")) for skip in SKIPPED]
_REFUSED = [(re.compile(rf"(?:^|\.)(?:{refusal.pattern})(?:\.|$)"), refusal) for refusal in REFUSED]
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_CANONICAL_TENSORS = frozenset((rule.in_layer, rule.tensor) for rule in CANONICAL)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Dims = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class BareName:
    """A tensor's name without what producers put around it.

    Attributes:
        layer: number of its layer, or None where it stands once in the model.
        tensor: the rest: `mlp.up_proj.weight`, or `norm.weight`.
    """

    layer: int | None
    tensor: str

    def __str__(self) -> str:
        return self.tensor if self.layer is None else f"layers.{self.layer}.{self.tensor}"

    @property
    def canonical(self) -> str:
        return str(self) if self.tensor.startswith("lm_head.") else f"model.{self}"


def without_wrappers(name: str) -> str:
    """`name` without the segments of training wrappers, wherever they stand."""
    segments, at = name.split("."), 0
    while at < len(segments):
        for wrapper in WRAPPERS:
            if tuple(segments[at : at + len(wrapper)]) == wrapper:
                del segments[at : at + len(wrapper)]
                at = 0
                break
        else:
            at += 1
    return ".".join(segments)


def without_roots(name: str) -> str:
    """`name` without the leading segments that stand for the text model."""
    segments = name.split(".")
    while len(segments) > 1 and segments[0] in ROOTS:
        segments.pop(0)
    return ".".join(segments)


def split_layer(name: str) -> BareName:
    """Return a name without wrappers and roots, with its layer apart."""
    match = _LAYER.fullmatch(name)
    return BareName(int(match[1]), match[2]) if match else BareName(None, name)


def bare_name(name: str) -> BareName:
    """`name` without wrappers and roots."""
    return split_layer(without_roots(without_wrappers(name)))


def skip_rule(bare: BareName) -> str | None:
    """Return the rule by which a tensor is left out, or None."""
    return next((rule for rule, pattern in _SKIPPED if pattern.match(str(bare))), None)


def canonical_name(name: str) -> str | None:
    """Return the canonical name of a tensor, or None where it belongs to a part that is left out.

    A name that is not of this family comes back with its wrappers replaced all the same; whether it is
    one that the model has is for `CheckpointIndex.check` to say.
    """
    bare = bare_name(name)
    return None if skip_rule(bare) else bare.canonical


def refusal(name: str) -> Refusal | None:
    """Say why a checkpoint with a tensor of this name can neither be run nor converted, or None."""
    return next((found for pattern, found in _REFUSED if pattern.search(name)), None)


def foreign_layout(name: str) -> str | None:
    """Say whose layout a name betrays that is not canonical but can be converted, or None."""
    bare = bare_name(name)
    if bare.layer is not None and bare.tensor.startswith("mixer."):
        return "mixer"
    key = (bare.layer is not None, bare.tensor)
    if key in _CANONICAL_TENSORS:
        return None
    return next((rule.name for rule in FOREIGN if (rule.in_layer, rule.tensor) == key), None)


def expected_tensors(config: ModelConfig) -> dict[str, Dims]:
    """Return every tensor a model of this shape has, `lm_head.weight` included: canonical name -> its
    dimensions, each as (the config's name for it, size)."""
    vocab, hidden = ("vocab_size", config.vocab_size), ("hidden_size", config.hidden_size)
    tensors: dict[str, Dims] = {EMBEDDING: (vocab, hidden)}
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
    return tensors | {"model.norm.weight": (hidden,), HEAD: (vocab, hidden)}


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
