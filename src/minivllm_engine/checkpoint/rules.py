"""The rules about tensor names, as data: one table for the loader and for the conversion.

Every weight of a model is made of blocks: rows that belong together, such as the queries of one layer. A
rule says of a tensor's name which blocks lie in it, and in what order. CANONICAL are the names of
`Qwen3_5ForCausalLM`, the ones a model is run from; FOREIGN are those of other producers. Two rules that
hold the same block say how one layout becomes the other.
"""

from dataclasses import dataclass
from typing import Literal

Transform = Literal["copy", "minus_one", "conv_axis"]

# Segments that training wrappers put into names, anywhere and in any number: DP and DDP, torch.compile,
# FSDP, activation checkpoints, Lightning Fabric, PEFT.
WRAPPERS: tuple[tuple[str, ...], ...] = (
    ("module",),
    ("_orig_mod",),
    ("_fsdp_wrapped_module",),
    ("_checkpoint_wrapped_module",),
    ("_forward_module",),
    ("base_layer",),
    ("base_model", "model"),
    ("modules_to_save", "default"),
)

# Leading segments before the text model, in any number: `model.language_model.` in official files, `model.`
# in text-only ones, none in bare backbones, repeated ones after a save bug of transformers 5.5.
ROOTS = frozenset({"model", "language_model", "transformer", "backbone", "decoder"})


@dataclass(frozen=True, slots=True)
class Skip:
    """Tensors that are left out. pattern: matches the segments that a name starts with, roots gone."""

    rule: str
    pattern: str


SKIPPED = (
    Skip("text-only", r"visual|vision_tower|vision_model"),
    Skip("mtp", r"mtp|mtp_[^.]*"),
    Skip("rotary-buffer", r"(layers\.\d+\.\w+\.)?rotary_emb\.inv_freq"),
    # PEFT keeps a module as it was beside the one that it trained and saved, which counts.
    Skip("peft-original", r"(.+\.)?original_module"),
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Whole segments that betray what cannot be read. pattern: matches one or more of them."""

    pattern: str
    why: str
    remedy: str


_DEQUANTISE = "Dequantise it first, or use the checkpoint that it was made from."
REFUSED = (
    Refusal(
        r"weight_scale[^.]*|weight_packed|weight_zero_point|qweight|qzeros|scales|biases|g_idx"
        r"|input_scale|absmax|nested_absmax|quant_map|quant_state|SCB",
        "quantised weights are not supported",
        _DEQUANTISE,
    ),
    Refusal(
        r"lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector",
        "this is a LoRA adapter: it holds changes to a base model that lies elsewhere",
        "Merge with PEFT: model.merge_and_unload().save_pretrained(DIR).",
    ),
    Refusal(
        r"experts|shared_expert|shared_expert_gate",
        "mixture-of-experts models are not supported",
        "Use a dense model of the family.",
    ),
    Refusal(
        r"f_a_proj|g_a_proj|kv_a_proj_with_mqa|attn\.f_proj",
        "Kimi Delta Attention, with a decay for each channel, is another recurrence",
        "Use a Gated DeltaNet model.",
    ),
    Refusal(
        r"linear_attn\.[qkv]_conv1d|attention_layer_norm|feedforward_layer_norm",
        "OLMo-Hybrid's post-norm attention layers are not supported",
        "Use a model of the Qwen3.5 family.",
    ),
    Refusal(
        r"[qkv]_conv1d\.bias|conv1d\.bias",
        "a convolution with a bias is not supported",
        "Use a model trained without it (conv_bias: false).",
    ),
    Refusal(
        r"blk\.\d+|ssm_[^.]*",
        "GGUF names: its weights are usually quantised, and rows of q and k are permuted",
        "Use the Hugging Face checkpoint that it was made from.",
    ),
    Refusal(
        r"linear_qgkv|self_attention",
        "Megatron names: rows of several projections are interleaved in one tensor",
        "Export the model to Hugging Face first.",
    ),
)

# Rows of each block, as a product of fields and properties of `ModelConfig`.
BLOCK_ROWS: dict[str, tuple[str, ...]] = {
    "embedding": ("vocab_size",),
    "head": ("vocab_size",),
    "norm.final": ("hidden_size",),
    "norm.mixer": ("hidden_size",),
    "norm.mlp": ("hidden_size",),
    "mlp.gate": ("intermediate_size",),
    "mlp.up": ("intermediate_size",),
    "mlp.down": ("hidden_size",),
    "linear.q": ("key_dim",),
    "linear.k": ("key_dim",),
    "linear.v": ("value_dim",),
    "linear.z": ("value_dim",),
    "linear.b": ("linear_num_value_heads",),
    "linear.a": ("linear_num_value_heads",),
    "linear.conv_q": ("key_dim",),
    "linear.conv_k": ("key_dim",),
    "linear.conv_v": ("value_dim",),
    "linear.A_log": ("linear_num_value_heads",),
    "linear.dt_bias": ("linear_num_value_heads",),
    "linear.norm": ("linear_value_head_dim",),
    "linear.out": ("hidden_size",),
    "attention.q": ("num_attention_heads", "head_dim"),
    "attention.gate": ("num_attention_heads", "head_dim"),
    "attention.k": ("num_key_value_heads", "head_dim"),
    "attention.v": ("num_key_value_heads", "head_dim"),
    "attention.o": ("hidden_size",),
    "attention.q_bias": ("num_attention_heads", "head_dim"),
    "attention.gate_bias": ("num_attention_heads", "head_dim"),
    "attention.k_bias": ("num_key_value_heads", "head_dim"),
    "attention.v_bias": ("num_key_value_heads", "head_dim"),
    "attention.o_bias": ("hidden_size",),
    "attention.q_norm": ("head_dim",),
    "attention.k_norm": ("head_dim",),
}


@dataclass(frozen=True, slots=True)
class Section:
    """Blocks one after the other. groups: a field of the config; the rows of all blocks are cut into so
    many groups, and lie group by group. None: each block as a whole."""

    blocks: tuple[str, ...]
    groups: str | None = None


@dataclass(frozen=True, slots=True)
class TensorRule:
    """What a tensor holds.

    Attributes:
        tensor: its name, without the layer's: `mlp.up_proj.weight` in a layer, else `norm.weight`.
        style: counts only where this style was recognised or chosen, and then before rules
            without one; see `conversion.styles`.
        in_layer: it stands in each layer, not once for the model.
    """

    name: str
    tensor: str
    sections: tuple[Section, ...]
    style: str | None = None
    in_layer: bool = True

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(block for section in self.sections for block in section.blocks)


def _whole(
    name: str, tensor: str, *blocks: str, style: str | None = None, in_layer: bool = True
) -> TensorRule:
    return TensorRule(name, tensor, (Section(blocks),), style, in_layer)


_PER_HEAD = "num_attention_heads"
_PER_KEY_HEAD = "linear_num_key_heads"

CANONICAL = (
    _whole("canonical", "embed_tokens.weight", "embedding", in_layer=False),
    _whole("canonical", "norm.weight", "norm.final", in_layer=False),
    _whole("canonical", "lm_head.weight", "head", in_layer=False),
    _whole("canonical", "input_layernorm.weight", "norm.mixer"),
    _whole("canonical", "post_attention_layernorm.weight", "norm.mlp"),
    _whole("canonical", "mlp.gate_proj.weight", "mlp.gate"),
    _whole("canonical", "mlp.up_proj.weight", "mlp.up"),
    _whole("canonical", "mlp.down_proj.weight", "mlp.down"),
    _whole("canonical", "linear_attn.in_proj_qkv.weight", "linear.q", "linear.k", "linear.v"),
    _whole("canonical", "linear_attn.in_proj_z.weight", "linear.z"),
    _whole("canonical", "linear_attn.in_proj_b.weight", "linear.b"),
    _whole("canonical", "linear_attn.in_proj_a.weight", "linear.a"),
    _whole(
        "canonical",
        "linear_attn.conv1d.weight",
        "linear.conv_q",
        "linear.conv_k",
        "linear.conv_v",
    ),
    _whole("canonical", "linear_attn.A_log", "linear.A_log"),
    _whole("canonical", "linear_attn.dt_bias", "linear.dt_bias"),
    _whole("canonical", "linear_attn.norm.weight", "linear.norm"),
    _whole("canonical", "linear_attn.out_proj.weight", "linear.out"),
    TensorRule(
        "canonical",
        "self_attn.q_proj.weight",
        (Section(("attention.q", "attention.gate"), _PER_HEAD),),
    ),
    TensorRule(
        "canonical",
        "self_attn.q_proj.bias",
        (Section(("attention.q_bias", "attention.gate_bias"), _PER_HEAD),),
    ),
    *(
        _whole("canonical", f"self_attn.{part}_proj.{kind}", f"attention.{part}{suffix}")
        for kind, suffix in (("weight", ""), ("bias", "_bias"))
        for part in ("k", "v", "o")
    ),
    _whole("canonical", "self_attn.q_norm.weight", "attention.q_norm"),
    _whole("canonical", "self_attn.k_norm.weight", "attention.k_norm"),
)

_QKVZ = ("linear.q", "linear.k", "linear.v", "linear.z")
_BA = ("linear.b", "linear.a")


def _attention_rules(kind: str, suffix: str) -> tuple[TensorRule, ...]:
    """Layouts of queries and output gates; `suffix` is that of the blocks of a weight or a bias."""
    q, gate, k, v = (f"attention.{part}{suffix}" for part in ("q", "gate", "k", "v"))
    return (
        _whole("q-gate-halves", f"self_attn.q_proj.{kind}", q, gate, style="halves"),
        _whole("q-gate-separate", f"self_attn.q_proj.{kind}", q, style="q-gate-separate"),
        _whole("q-gate-separate", f"self_attn.q_gate_proj.{kind}", gate),
        _whole("qkv-halves", f"self_attn.qkv_proj.{kind}", q, gate, k, v, style="halves"),
        TensorRule(
            "qkv-fused",
            f"self_attn.qkv_proj.{kind}",
            (Section((q, gate), _PER_HEAD), Section((k, v))),
        ),
    )


FOREIGN = (
    # Qwen3-Next: interleaved by key head. vLLM and others use the same names for plain concatenation.
    TensorRule(
        "qkvz-interleaved",
        "linear_attn.in_proj_qkvz.weight",
        (Section(_QKVZ, _PER_KEY_HEAD),),
        "interleaved",
    ),
    TensorRule(
        "ba-interleaved",
        "linear_attn.in_proj_ba.weight",
        (Section(_BA, _PER_KEY_HEAD),),
        "interleaved",
    ),
    _whole("qkvz-concat", "linear_attn.in_proj_qkvz.weight", *_QKVZ, style="concat"),
    _whole("ba-concat", "linear_attn.in_proj_ba.weight", *_BA, style="concat"),
    _whole("in-proj-fused", "linear_attn.in_proj.weight", *_QKVZ, *_BA),
    _whole("in-proj-fused", "linear_attn.out_norm.weight", "linear.norm"),
    _whole("gate-up", "mlp.gate_up_proj.weight", "mlp.gate", "mlp.up"),
    *_attention_rules("weight", ""),
    *_attention_rules("bias", "_bias"),
    # Flash Linear Attention's GatedDeltaNet.
    _whole("fla", "embeddings.weight", "embedding", in_layer=False),
    _whole("fla", "attn_norm.weight", "norm.mixer"),
    _whole("fla", "mlp_norm.weight", "norm.mlp"),
    *(
        _whole("fla", f"attn.{name}", block)
        for name, block in (
            ("q_proj.weight", "linear.q"),
            ("k_proj.weight", "linear.k"),
            ("v_proj.weight", "linear.v"),
            ("q_conv1d.weight", "linear.conv_q"),
            ("k_conv1d.weight", "linear.conv_k"),
            ("v_conv1d.weight", "linear.conv_v"),
            ("g_proj.weight", "linear.z"),
            ("b_proj.weight", "linear.b"),
            ("a_proj.weight", "linear.a"),
            ("A_log", "linear.A_log"),
            ("dt_bias", "linear.dt_bias"),
            ("o_norm.weight", "linear.norm"),
            ("o_proj.weight", "linear.out"),
        )
    ),
    _whole("fla-gate-up", "mlp.gate_proj.weight", "mlp.gate", "mlp.up", style="fla-gate-up"),
)

# What a style does to the values of blocks, wherever they lie. FLA's norms multiply by w, and mlx-lm
# stores 1 + w, where this family multiplies by 1 + w; mlx-lm also moves the axis of the convolution.
STYLE_TRANSFORMS: dict[str, dict[str, Transform]] = {
    "fla": {"norm.mixer": "minus_one", "norm.mlp": "minus_one", "norm.final": "minus_one"},
    "mlx": {
        "norm.mixer": "minus_one",
        "norm.mlp": "minus_one",
        "norm.final": "minus_one",
        "attention.q_norm": "minus_one",
        "attention.k_norm": "minus_one",
        "linear.conv_q": "conv_axis",
        "linear.conv_k": "conv_axis",
        "linear.conv_v": "conv_axis",
    },
}

# Blocks that are fp32 in a converted checkpoint, whatever dtype was asked for.
PROTECTED = frozenset({"linear.A_log", "linear.norm"})
