"""The shape of a model, read from its config.json: nested or flat, strict, without torch.

Fields and defaults follow transformers' `Qwen3_5TextConfig`, with two differences: the fields that
give the model its shape have no default, and neither has the pattern of the layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape
from minivllm_engine.model_config.generation_config import MOST_END_IDS, read_json_object
from minivllm_engine.model_config.reader import (
    LARGEST,
    ConfigReader,
    refuse_foreign,
    refuse_other_families,
)
from minivllm_engine.model_config.rope import RopeConfig, read_rope

LAYER_TYPES = ("linear_attention", "full_attention")

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)

# Far beyond any model, and small enough to make a list of.
_MOST_LAYERS, _WIDEST_KERNEL = 10_000, 1024


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of Gated DeltaNet ("linear_attention") and gated GQA ("full_attention") layers.

    Attributes:
        max_position_embeddings: longest sequence the positions are made for, yarn's factor included.
        tie_word_embeddings: true if either level of the config says so.
        eos_token_ids: of both levels, in the order found; may be empty.
        dtype: of the weights on disk, "fp32", "bf16" or "fp16"; "fp32" where the file names none.
        state_dtype: of the recurrent state (`mamba_ssm_dtype`), "fp32" or "bf16".
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    state_dtype: str

    @property
    def key_dim(self) -> int:
        """Width of all DeltaNet keys (and queries) together: H * K."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of all DeltaNet values together: HV * V."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: queries, keys and values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def num_linear_layers(self) -> int:
        return self.layer_types.count("linear_attention")

    @property
    def num_attention_layers(self) -> int:
        return self.layer_types.count("full_attention")

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rope.partial_rotary_factor)

    def is_attention(self, layer: int) -> bool:
        return self.layer_types[layer] == "full_attention"

    @classmethod
    def from_dir(cls, path: Path) -> "ModelConfig":
        """Read `path`/config.json.

        Raises:
            CheckpointError: there is no such file, it is no JSON object, or `from_dict` refuses it.
        """
        file = path / "config.json"
        return cls.from_dict(read_json_object(file), source=str(file))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], source: str) -> "ModelConfig":
        """Build a config from the content of a config.json, in any of its known shapes.

        Args:
            content: nested (`text_config`) or flat.
            source: what error messages and warnings call it.

        Raises:
            CheckpointError: a missing key, a value that is wrong or contradicts another, or a model
                of another family.
        """
        reader = ConfigReader(content, source)
        refuse_other_families(reader)
        sizes = _read_sizes(reader)
        refuse_foreign(reader)
        layer_types = _read_layer_types(reader, sizes["num_hidden_layers"])
        rope, max_length = read_rope(reader, warn="full_attention" in layer_types)
        config = cls(
            **sizes,
            layer_types=layer_types,
            linear_conv_kernel_dim=reader.integer(
                "linear_conv_kernel_dim",
                _or(reader.get("linear_conv_kernel_dim"), 4),
                at_least=2,
                at_most=_WIDEST_KERNEL,
            ),
            attention_bias=reader.boolean("attention_bias", reader.get("attention_bias")),
            rms_norm_eps=reader.number(
                "rms_norm_eps", _or(reader.get("rms_norm_eps"), 1e-6), at_most=1
            ),
            rope=rope,
            tie_word_embeddings=any(
                reader.boolean("tie_word_embeddings", level.get("tie_word_embeddings"))
                for level in (reader.text, reader.top)
            ),
            max_position_embeddings=max_length,
            eos_token_ids=_read_eos_token_ids(reader),
            dtype=reader.dtype("dtype", "torch_dtype", allowed=("fp32", "bf16", "fp16")) or "fp32",
            state_dtype=reader.dtype("mamba_ssm_dtype", allowed=("fp32", "bf16")) or "fp32",
        )
        _check_divisors(reader, config)
        return config


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _read_sizes(reader: ConfigReader) -> dict[str, int]:
    missing = [key for key in _SIZES if reader.text.get(key) is None]
    if missing:
        raise CheckpointError(
            f"{reader.source} has no {', '.join(missing)}",
            why=f"model_type is {escape(repr(reader.get('model_type')))}",
            hint="Only Gated DeltaNet hybrids of the Qwen3.5 family can be run; "
            "their configs hold these keys.",
        )
    most = {"num_hidden_layers": _MOST_LAYERS}
    return {
        key: reader.integer(key, reader.text[key], at_most=most.get(key, LARGEST)) for key in _SIZES
    }


def _read_layer_types(reader: ConfigReader, count: int) -> tuple[str, ...]:
    types, interval = reader.text.get("layer_types"), reader.text.get("full_attention_interval")
    if types is None and interval is None:
        raise CheckpointError(
            f"{reader.source} has neither layer_types nor full_attention_interval",
            why="so nothing says which layers are attention and which are DeltaNet",
            hint='Add "full_attention_interval": 4 (the value of Qwen3.5) or the list "layer_types".',
        )
    if types is None:
        every = reader.integer("full_attention_interval", interval)
        return tuple(LAYER_TYPES[(i + 1) % every == 0] for i in range(count))
    if not isinstance(types, list) or len(types) != count:
        raise reader.wrong(
            "layer_types", types, f"a list of num_hidden_layers ({count}) layer types"
        )
    for i, kind in enumerate(types):
        if kind not in LAYER_TYPES:
            known = " or ".join(map(repr, LAYER_TYPES))
            raise reader.wrong(f"layer_types[{i}]", kind, known)
    return tuple(types)


def _read_eos_token_ids(reader: ConfigReader) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for level in (reader.text, reader.top):
        value = _or(level.get("eos_token_id"), [])
        given = value if isinstance(value, list) else [value]
        if len(given) > MOST_END_IDS:
            what = f"a list of {len(given):,}"
            raise reader.wrong("eos_token_id", what, f"at most {MOST_END_IDS:,} ids")
        for token in given:
            ids[reader.integer("eos_token_id", token, at_least=0)] = None
    return tuple(ids)


def _check_divisors(reader: ConfigReader, config: ModelConfig) -> None:
    for many, few in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        value, divisor = getattr(config, many), getattr(config, few)
        if value % divisor:
            raise reader.wrong(many, value, f"a multiple of {few} ({divisor})")
    if config.num_attention_layers and (config.rotary_dim % 2 or not config.rotary_dim):
        raise reader.wrong(
            "partial_rotary_factor",
            config.rope.partial_rotary_factor,
            f"one that rotates an even number of head_dim ({config.head_dim}), "
            f"not {config.rotary_dim}",
        )
