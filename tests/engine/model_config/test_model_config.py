"""config.json in all its shapes, and everything that can be wrong with it."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.model_config.config import ModelConfig
from support.tiny_checkpoint import nested, tiny_config

# The text model of the official Qwen3.5-0.8B.
OFFICIAL_TEXT = {
    "model_type": "qwen3_5_text",
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "vocab_size": 248320,
}
OFFICIAL = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": OFFICIAL_TEXT,
    "tie_word_embeddings": True,
    "vision_config": {"model_type": "qwen3_5", "hidden_size": 768, "num_heads": 12},
}


def read(content: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_dict(content, source="config.json")


def flat(**changes: Any) -> dict[str, Any]:
    return {"architectures": ["Qwen3_5ForCausalLM"], **OFFICIAL_TEXT, **changes}


def without(content: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in keys}


def test_the_official_file() -> None:
    config = read(OFFICIAL)
    assert (config.num_linear_layers, config.num_attention_layers) == (18, 6)
    assert [i for i in range(24) if config.is_attention(i)] == [3, 7, 11, 15, 19, 23]
    assert (config.key_dim, config.value_dim, config.conv_dim) == (2048, 2048, 6144)
    assert (config.rotary_dim, config.rope.theta, config.rope.rope_type) == (64, 1e7, "default")
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (248044,)
    assert (config.dtype, config.state_dtype) == ("bf16", "fp32")
    assert config.max_position_embeddings == 262144
    assert config.vocab_size == 248320


def test_nested_and_flat_are_the_same() -> None:
    assert read(OFFICIAL) == read(flat())


def test_miniqwens_own_shape() -> None:
    """Flat, an interval for the layers, flat keys for the rotary embedding."""
    keys = ("layer_types", "rope_parameters", "model_type", "architectures")
    content = without(flat(), *keys) | {"rope_theta": 1e7, "partial_rotary_factor": 0.25}
    assert read(content) == read(OFFICIAL)


@pytest.mark.parametrize(
    "architecture", ["Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM", None]
)
@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_text", "miniqwen", None])
@pytest.mark.parametrize("shape", ["nested", "flat"])
def test_g2_any_pair_of_architecture_and_model_type(architecture, model_type, shape) -> None:
    """Nothing depends on what the classes are called, or on a library that knows them."""
    content = dict(OFFICIAL) if shape == "nested" else flat()
    content |= {"architectures": [architecture], "model_type": model_type}
    assert read(content) == read(OFFICIAL)


def test_layer_types_win_over_the_interval() -> None:
    kinds = ["full_attention"] * 12 + ["linear_attention"] * 12
    assert read(flat(layer_types=kinds)).layer_types == tuple(kinds)


@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
def test_one_kind_of_layer_only(kind: str) -> None:
    config = read(flat(layer_types=[kind] * 24))
    assert config.layer_types == (kind,) * 24


def test_g9_rope_settings_in_three_places() -> None:
    bare = without(flat(), "rope_parameters")
    inside = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    spellings = [
        bare | {"rope_parameters": inside},
        bare | {"rope_theta": 500000, "partial_rotary_factor": 0.5},
        bare | {"rope_theta": 500000, "partial_rotary_factor": 0.5, "rope_scaling": None},
        bare
        | {"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_scaling": {"type": "default"}},
        bare | {"rope_theta": 1.0, "partial_rotary_factor": 0.25, "rope_parameters": inside},
        {"text_config": without(bare, "architectures"), "rope_parameters": inside},
    ]
    for content in spellings:
        rope = read(content).rope
        assert (rope.theta, rope.partial_rotary_factor, rope.rope_type) == (5e5, 0.5, "default")


def test_g9_a_missing_theta_is_warned_about_loudly(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = read(without(flat(), "rope_parameters"))
    assert (config.rope.theta, config.rope.partial_rotary_factor) == (10_000.0, 0.25)
    (record,) = caplog.records
    for part in ("config.json", "rope_theta", "10000", "1e7"):
        assert part in record.getMessage()


def test_g9_a_theta_that_is_there_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    read(OFFICIAL)
    read(without(flat(layer_types=["linear_attention"] * 24), "rope_parameters"))
    assert not caplog.records


YARN = {"factor": 4.0, "original_max_position_embeddings": 262144}


def test_g10_longest_sequence_from_both_spellings() -> None:
    bare = without(flat(), "rope_parameters")
    for content in (
        bare | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7, **YARN}},
        bare | {"rope_theta": 1e7, "rope_scaling": {"type": "yarn", **YARN}},
        bare | {"rope_theta": 1e7, "rope_scaling": {"rope_type": "yarn", **YARN}},
        bare | {"rope_theta": 1e7, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        bare
        | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7, **YARN}}
        | {"max_position_embeddings": 1048576},
    ):
        config = read(content)
        assert config.max_position_embeddings == 4 * 262144
        assert config.rope.factor == 4.0
        assert config.rope.original_max_position_embeddings == 262144
        assert math.isclose(config.rope.attention_factor, 0.1 * math.log(4) + 1)


def test_yarn_in_detail() -> None:
    given = {"rope_type": "yarn", "rope_theta": 1e7, **YARN, "beta_fast": 16, "beta_slow": 2}
    rope = read(flat(rope_parameters=given | {"attention_factor": 1.5, "truncate": False})).rope
    assert (rope.beta_fast, rope.beta_slow) == (16.0, 2.0)
    assert (rope.attention_factor, rope.truncate) == (1.5, False)
    rope = read(flat(rope_parameters=given | {"mscale": 2.0, "mscale_all_dim": 1.0})).rope
    log = 0.1 * math.log(4)
    assert math.isclose(rope.attention_factor, (2 * log + 1) / (log + 1))


def test_e12_state_dtype_is_read_from_the_config() -> None:
    assert read(flat(mamba_ssm_dtype="bfloat16", dtype="float16")).state_dtype == "bf16"
    assert read(flat(mamba_ssm_dtype="bfloat16", dtype="float16")).dtype == "fp16"
    assert read(without(flat(), "mamba_ssm_dtype")).state_dtype == "fp32"


def test_dtype_in_old_and_new_spelling() -> None:
    bare = without(flat(), "dtype")
    assert read(bare | {"torch_dtype": "bfloat16"}).dtype == "bf16"
    assert read({"text_config": bare, "torch_dtype": "torch.float16"}).dtype == "fp16"
    assert read({"text_config": bare, "dtype": "float32"}).dtype == "fp32"
    assert read(bare).dtype == "fp32"


def test_tied_where_either_level_says_so() -> None:
    for text in (True, False, None):
        for top in (True, False, None):
            content = {
                "text_config": flat(tie_word_embeddings=text),
                "tie_word_embeddings": top,
            }
            assert read(content).tie_word_embeddings == bool(text or top)


def test_b5_thousands_of_end_ids_are_refused() -> None:
    with pytest.raises(CheckpointError, match="eos_token_id") as caught:
        read(flat(eos_token_id=list(range(200_000))))
    assert "1,024" in caught.value.why
    assert read(flat(eos_token_id=[*range(1000), *range(24)])).eos_token_ids == tuple(range(1000))


def test_end_ids_of_both_levels() -> None:
    content = {"text_config": flat(eos_token_id=[7, 5]), "eos_token_id": 9}
    assert read(content).eos_token_ids == (7, 5, 9)
    assert read({"text_config": flat(eos_token_id=7), "eos_token_id": 7}).eos_token_ids == (7,)
    assert read(flat(eos_token_id=None)).eos_token_ids == ()
    assert read(flat(eos_token_id=0)).eos_token_ids == (0,)


def test_configs_that_transformers_saves(tmp_path: Path) -> None:
    from support.transformers_oracle import Qwen3_5Config, Qwen3_5TextConfig

    text = Qwen3_5TextConfig(**without(tiny_config(), "model_type", "architectures"))
    text.save_pretrained(tmp_path)
    saved = ModelConfig.from_dir(tmp_path)
    assert saved == read(tiny_config())
    outer = Qwen3_5Config(text_config=text.to_dict(), tie_word_embeddings=True)
    outer.save_pretrained(tmp_path)
    assert ModelConfig.from_dir(tmp_path) == read(nested(tiny_config(tie_word_embeddings=True)))


WRONG = {
    "no_layer_types_and_no_interval": (
        without(flat(), "layer_types", "full_attention_interval"),
        ("layer_types", "full_attention_interval"),
    ),
    "unknown_layer_type": (
        flat(layer_types=["linear_attention"] * 23 + ["sliding_attention"]),
        ("layer_types[23]", "'sliding_attention'", "'linear_attention' or 'full_attention'"),
    ),
    "layer_types_of_another_length": (flat(num_hidden_layers=23), ("layer_types", "(23)")),
    "layer_types_no_list": (flat(layer_types="linear"), ("layer_types", "'linear'")),
    "interval_zero": (
        without(flat(full_attention_interval=0), "layer_types"),
        ("full_attention_interval", "0"),
    ),
    "sizes_missing": (
        without(flat(), "hidden_size", "linear_num_value_heads") | {"model_type": "llama"},
        ("hidden_size, linear_num_value_heads", "'llama'", "Gated DeltaNet"),
    ),
    "size_zero": (flat(hidden_size=0), ("hidden_size", "0", "1 or more")),
    "size_a_text": (flat(vocab_size="248320"), ("vocab_size", "'248320'")),
    "size_a_boolean": (flat(head_dim=True), ("head_dim", "True")),
    "size_a_fraction": (flat(num_attention_heads=8.0), ("num_attention_heads", "8.0")),
    "value_heads": (flat(linear_num_value_heads=24), ("linear_num_value_heads", "24", "16")),
    "query_heads": (flat(num_key_value_heads=3), ("num_attention_heads", "8", "3")),
    "kernel_of_one": (flat(linear_conv_kernel_dim=1), ("linear_conv_kernel_dim", "2 or more")),
    "eps": (flat(rms_norm_eps="1e-6"), ("rms_norm_eps", "'1e-6'")),
    "eps_negative": (flat(rms_norm_eps=-1.0), ("rms_norm_eps", "-1.0")),
    "theta": (flat(rope_parameters={"rope_theta": "1e7"}), ("rope_theta", "'1e7'")),
    "rotary_factor": (
        flat(rope_parameters={"partial_rotary_factor": 1.5}),
        ("partial_rotary_factor", "1.5"),
    ),
    "odd_rotary_dim": (
        flat(head_dim=20, rope_parameters={"rope_theta": 1e7, "partial_rotary_factor": 0.25}),
        ("partial_rotary_factor", "20", "5"),
    ),
    "rope_type": (
        flat(rope_parameters={"rope_type": "longrope"}),
        ("rope_type", "'longrope'", "'yarn'"),
    ),
    "rope_no_object": (flat(rope_parameters=[1]), ("rope_parameters", "[1]")),
    "attention_bias": (flat(attention_bias="no"), ("attention_bias", "'no'")),
    "tie": (flat(tie_word_embeddings=1), ("tie_word_embeddings", "1")),
    "eos": (flat(eos_token_id=["x"]), ("eos_token_id", "'x'")),
    "dtype": (flat(dtype="int8"), ("dtype", "'int8'", "'bfloat16'")),
    "state_dtype": (flat(mamba_ssm_dtype="float16"), ("mamba_ssm_dtype", "'float16'")),
    "activation": (flat(hidden_act="gelu"), ("hidden_act", "'gelu'")),
    "gate_type": (flat(output_gate_type="sigmoid"), ("output_gate_type", "'sigmoid'")),
    "no_gate": (flat(attn_output_gate=False), ("attn_output_gate", "False")),
    "moe": (flat(model_type="qwen3_5_moe_text"), ("qwen3_5_moe_text", "mixture-of-experts")),
    "moe_by_experts": (flat(num_experts=8), ("num_experts", "8", "mixture-of-experts")),
    "qwen3_next": (flat(model_type="qwen3_next"), ("qwen3_next", "mixture-of-experts")),
    "kimi": (flat(model_type="kimi_linear"), ("kimi_linear", "recurrence")),
    "length_of_one": (flat(max_position_embeddings=1), ("max_position_embeddings", "2 or more")),
    "length_beyond": (flat(max_position_embeddings=10**30), ("max_position_embeddings", "at most")),
    "theta_of_400_digits": (flat(rope_parameters={"rope_theta": 10**400}), ("rope_theta",)),
    "kernel_beyond": (flat(linear_conv_kernel_dim=10**9), ("linear_conv_kernel_dim", "1,024")),
    "eps_beyond": (flat(rms_norm_eps=1e300), ("rms_norm_eps", "1e+300")),
    **{
        f"yarn_{name}_{value!r:.12}": (
            flat(rope_parameters={"rope_type": "yarn", "rope_theta": 1e7, **YARN, name: value}),
            (name,),
        )
        for name, value in (
            *(("factor", bad) for bad in (1e308, 1e-9, 0.5, "4", 10**400)),
            *(("mscale", bad) for bad in ("x", 1e-300, -1)),
            *(("beta_fast", bad) for bad in (1e-320, 1e308, 0)),
            *(("beta_slow", bad) for bad in (1e-320, True)),
            *(("attention_factor", bad) for bad in (1e-320, 1e300)),
            *(("rope_theta", bad) for bad in (1, 1.0, 0.5)),
            ("original_max_position_embeddings", 1),
        )
    },
    "text_config": ({"text_config": 3}, ("text_config", "3")),
}


@pytest.mark.parametrize(("content", "parts"), WRONG.values(), ids=WRONG)
def test_wrong_configs(content: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(content)
    message = str(caught.value)
    for part in ("config.json", *parts):
        assert part in message


def test_unknown_keys_and_the_swish_gate_are_accepted() -> None:
    assert read(flat(output_gate_type="swish", brand_new=1, mtp_x=None)) == read(OFFICIAL)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe\x00", b""])
def test_files_that_are_no_config(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        ModelConfig.from_dir(tmp_path)


def test_reads_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OFFICIAL))
    assert ModelConfig.from_dir(tmp_path) == read(OFFICIAL)
