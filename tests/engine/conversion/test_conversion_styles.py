"""Every producer's layout: converted, loaded, and judged by the logits of the source model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm_engine import LLM, SamplingParams
from minivllm_engine.checkpoint.rules import STYLE_TRANSFORMS
from minivllm_engine.conversion import open_source, plan_conversion
from minivllm_engine.core.errors import CheckpointError
from support import converted as layouts
from support.byte_tokenizer import write_byte_tokenizer
from support.converted import IDS, convert_to, engine_logits
from support.fla_model import FlaModel, fla_config
from support.tiny_checkpoint import (
    BARE,
    NESTED_TWICE,
    OFFICIAL,
    TEXT,
    nested,
    random_tensors,
    tiny_config,
    write_checkpoint,
)
from support.transformers_oracle import TransformersOracle

TOLERANCE = 2e-4
WRONG = 0.05  # a model with one wrong layout is further off than this

CONFIG = tiny_config()
REFERENCE = random_tensors(CONFIG)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """transformers' logits of REFERENCE."""
    path = write_checkpoint(tmp_path_factory.mktemp("reference"), CONFIG, REFERENCE)
    return TransformersOracle(path).logits(IDS)


def difference(path: Path, expected: torch.Tensor) -> float:
    return float((engine_logits(path) - expected).abs().max())


@pytest.mark.parametrize("prefix", [TEXT, OFFICIAL, NESTED_TWICE, BARE, "language_model.model."])
@pytest.mark.parametrize("shards", [1, 3])
def test_g1_every_naming_gives_the_same_logits(
    prefix: str, shards: int, expected: torch.Tensor, tmp_path: Path
) -> None:
    content = nested(CONFIG) if prefix == OFFICIAL else CONFIG
    tensors = random_tensors(CONFIG, prefix=prefix)
    src = write_checkpoint(tmp_path / "src", content, tensors, shards=shards)
    convert_to(src, tmp_path / "dst")
    assert difference(tmp_path / "dst", expected) < TOLERANCE
    assert set(load_file(tmp_path / "dst/model.safetensors")) == set(REFERENCE)


def test_g1_no_tensor_of_the_text_model_is_an_error(tmp_path: Path) -> None:
    visual = {"model.visual.blocks.0.attn.qkv.weight": torch.zeros(2)}
    src = write_checkpoint(tmp_path / "src", CONFIG, visual)
    with pytest.raises(CheckpointError, match="no text tensor"):
        plan_conversion(open_source(src))


LAYOUTS = {
    "qkvz_interleaved": (layouts.qkvz_interleaved, {"qkvz_layout": "interleaved"}),
    "qkvz_concat": (layouts.qkvz_concat, {"qkvz_layout": "concat"}),
    "q_gate_halves": (layouts.q_gate_halves, {"q_gate_layout": "halves"}),
    "q_gate_separate": (layouts.q_gate_separate, {}),
    "qkv_fused": (layouts.qkv_fused, {}),
    "run_time_names": (layouts.run_time_names, {}),
    "in_proj_fused": (layouts.in_proj_fused, {}),
    "mlx": (layouts.mlx_export, {}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_other_producers(name: str, expected: torch.Tensor, tmp_path: Path) -> None:
    layout, options = LAYOUTS[name]
    src = write_checkpoint(tmp_path / "src", CONFIG, layout(REFERENCE, CONFIG))
    assert set(load_file(src / "model.safetensors")) != set(REFERENCE) or name in (
        "q_gate_halves",
        "mlx",
    )
    convert_to(src, tmp_path / "dst", **options)
    assert difference(tmp_path / "dst", expected) < TOLERANCE
    written = load_file(tmp_path / "dst/model.safetensors")
    assert set(written) == set(REFERENCE)
    for tensor, values in REFERENCE.items():
        torch.testing.assert_close(written[tensor], values, rtol=0, atol=2e-7, msg=tensor)


SHAPES = {
    "one_value_head_a_key_head": {"linear_num_value_heads": 2},
    "three_value_heads_a_key_head": {"linear_num_key_heads": 3, "linear_num_value_heads": 9},
    "one_key_head": {"linear_num_key_heads": 1, "linear_key_head_dim": 8},
    "keys_wider_than_values": {"linear_key_head_dim": 32, "linear_value_head_dim": 8},
    "one_head": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "three_taps": {"linear_conv_kernel_dim": 3, "intermediate_size": 96},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_every_shape_come_back_exactly(name: str, shape: str, tmp_path: Path) -> None:
    config = tiny_config(**SHAPES[shape], full_attention_interval=2, tie_word_embeddings=True)
    reference = random_tensors(config)
    layout, options = LAYOUTS[name]
    src = write_checkpoint(tmp_path / "src", config, layout(reference, config))
    convert_to(src, tmp_path / "dst", **options)
    written = load_file(tmp_path / "dst/model.safetensors")
    assert written.keys() == reference.keys()
    for tensor, values in reference.items():
        torch.testing.assert_close(written[tensor], values, rtol=0, atol=2e-7, msg=tensor)


@pytest.mark.parametrize("name", ["q_gate_halves", "q_gate_separate", "qkv_fused"])
def test_biases_follow_their_weights(name: str, tmp_path: Path) -> None:
    config = tiny_config(attention_bias=True, num_attention_heads=6)
    reference = random_tensors(config)
    layout, options = LAYOUTS[name]
    src = write_checkpoint(tmp_path / "src", config, layout(reference, config))
    convert_to(src, tmp_path / "dst", **options)
    written = load_file(tmp_path / "dst/model.safetensors")
    assert written.keys() == reference.keys()
    for tensor, values in reference.items():
        assert torch.equal(written[tensor], values), tensor


@pytest.mark.parametrize("q_gate", ["per-head", "halves"])
def test_queries_gates_keys_and_values_in_one_matrix(
    q_gate: str, expected: torch.Tensor, tmp_path: Path
) -> None:
    """The queries' part of a fused matrix has either order too."""
    tensors = REFERENCE if q_gate == "per-head" else layouts.q_gate_halves(REFERENCE, CONFIG)
    src = write_checkpoint(tmp_path / "src", CONFIG, layouts.qkv_fused(tensors, CONFIG))
    convert_to(src, tmp_path / "dst", q_gate_layout=q_gate)
    assert difference(tmp_path / "dst", expected) < TOLERANCE


@pytest.mark.parametrize(
    ("layout", "wrong"),
    [
        (layouts.qkvz_interleaved, {"qkvz_layout": "concat"}),
        (layouts.qkvz_concat, {"qkvz_layout": "interleaved"}),
        (layouts.q_gate_halves, {"q_gate_layout": "per-head"}),
        (lambda tensors, _: tensors, {"q_gate_layout": "halves"}),
    ],
    ids=[
        "interleaved_as_concat",
        "concat_as_interleaved",
        "halves_as_per_head",
        "per_head_as_halves",
    ],
)
def test_the_judge_sees_a_wrong_layout(layout, wrong, expected, tmp_path: Path) -> None:
    """All shapes agree; only logits can tell, and these comparisons do."""
    src = write_checkpoint(tmp_path / "src", CONFIG, layout(REFERENCE, CONFIG))
    convert_to(src, tmp_path / "dst", **wrong)
    assert difference(tmp_path / "dst", expected) > WRONG


@pytest.mark.parametrize("style", ["fla", "mlx"])
def test_the_judge_sees_an_unconverted_norm(
    style: str, expected: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if style == "fla":
        model = FlaModel(fla_config())
        expected, src = model(IDS), model.save(tmp_path / "src")
    else:
        src = write_checkpoint(tmp_path / "src", CONFIG, layouts.mlx_export(REFERENCE, CONFIG))
    for block in [b for b, t in STYLE_TRANSFORMS[style].items() if t == "minus_one"]:
        monkeypatch.delitem(STYLE_TRANSFORMS[style], block)
        convert_to(src, tmp_path / block)
        assert difference(tmp_path / block, expected) > WRONG, block
        monkeypatch.undo()


def test_fused_names_need_a_layout_where_nothing_tells(tmp_path: Path) -> None:
    tensors = layouts.qkvz_concat(REFERENCE, CONFIG)
    plan = plan_conversion(open_source(write_checkpoint(tmp_path / "src", CONFIG, tensors)))
    (problem,) = plan.problems
    assert problem.kind == "ambiguous"
    assert problem.name == "model.layers.*.linear_attn.in_proj_qkvz.weight"
    assert "--qkvz-layout" in problem.detail


@pytest.mark.parametrize("tied", [True, False])
def test_fla_models_have_no_attention_layer(tied: bool, tmp_path: Path) -> None:
    model = FlaModel(fla_config(tie_word_embeddings=tied))
    if tied:
        model.lm_head.weight = model.model.embeddings.weight
    expected = model(IDS)
    src = model.save(tmp_path / "src") if not tied else None
    if src is None:  # a tied head is not saved
        src = tmp_path / "src"
        src.mkdir()
        (src / "config.json").write_text(json.dumps(model.config))
        torch.save(
            {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"},
            src / "pytorch_model.bin",
        )
    write_byte_tokenizer(src)
    report = convert_to(src, tmp_path / "dst")
    assert report.num_tensors == 3 * 14 + (2 if tied else 3)
    assert difference(tmp_path / "dst", expected) < TOLERANCE
    with LLM(tmp_path / "dst") as llm:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        ids = llm.generate([IDS], params)[0].outputs[0].token_ids
        llm.check_integrity()
    reference = list(IDS)
    for _ in range(5):
        reference.append(int(model(reference)[-1].argmax()))
    assert list(ids) == reference[len(IDS) :]


def test_old_fla_files_hold_gate_and_up_in_one(tmp_path: Path) -> None:
    model = FlaModel(fla_config())
    src = model.save(tmp_path / "src")
    tensors = load_file(src / "model.safetensors")
    for name in [name for name in tensors if name.endswith("up_proj.weight")]:
        gate = name.replace("up_proj", "gate_proj")
        tensors[gate] = torch.cat([tensors[gate], tensors.pop(name)])
    save_file(tensors, src / "model.safetensors")
    convert_to(src, tmp_path / "dst")
    assert difference(tmp_path / "dst", model(IDS)) < TOLERANCE


def test_transformers_reads_a_converted_fla_model_too(tmp_path: Path) -> None:
    model = FlaModel(fla_config())
    convert_to(model.save(tmp_path / "src"), tmp_path / "dst")
    logits = TransformersOracle(tmp_path / "dst").logits(IDS)
    torch.testing.assert_close(logits, model(IDS), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "setting",
    [
        {"allow_neg_eigval": True},
        {"use_gate": False},
        {"use_short_conv": False},
        {"output_gate_activation": "sigmoid"},
        {"hidden_act": "gelu"},
        {"attnres_block_size": 4},
        {"attn": {"layers": [1], "num_heads": 2}},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_settings_of_fla_that_this_family_has_not(setting: dict, tmp_path: Path) -> None:
    src = FlaModel(fla_config()).save(tmp_path)
    (src / "config.json").write_text(json.dumps(fla_config(**setting)))
    with pytest.raises(CheckpointError, match=next(iter(setting))):
        plan_conversion(open_source(src))


def test_a_hybrid_of_fla_cannot_be_expressed(tmp_path: Path) -> None:
    model = FlaModel(fla_config())
    attention = model.model.layers[1].attn
    for name in ("A_log", "dt_bias", "q_conv1d", "k_conv1d", "v_conv1d", "g_proj", "b_proj"):
        delattr(attention, name)
    model.save(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        plan_conversion(open_source(tmp_path))
    assert "layer 1 is an attention layer of Flash Linear Attention" in caught.value.what
    assert "no output gate" in str(caught.value.why)


def test_another_recurrence_of_fla(tmp_path: Path) -> None:
    """Its DeltaNet, for one, has the same names but no decay."""
    model = FlaModel(fla_config())
    for layer in model.model.layers:
        del layer.attn.A_log
    model.save(tmp_path)
    with pytest.raises(CheckpointError, match="layer 0 holds no A_log"):
        plan_conversion(open_source(tmp_path))


def test_an_mlx_export_in_16_bits_is_undone_with_a_warning(tmp_path: Path) -> None:
    tensors = {
        name: tensor.bfloat16() for name, tensor in layouts.mlx_export(REFERENCE, CONFIG).items()
    }
    src = write_checkpoint(tmp_path / "src", CONFIG, tensors)
    notes = plan_conversion(open_source(src)).notes
    assert any("off by up to 0.004" in note for note in notes)
    convert_to(src, tmp_path / "dst")
    written = load_file(tmp_path / "dst/model.safetensors")
    for name, values in REFERENCE.items():
        if name.endswith("norm.weight") and "linear_attn" not in name:
            assert written[name].dtype == torch.float32
            assert (written[name] - values).abs().max() < 0.009  # half a step of bf16 at 2, twice


def test_two_conventions_in_one_checkpoint(tmp_path: Path) -> None:
    mixed = layouts.mlx_export(REFERENCE, CONFIG)
    name = "model.layers.1.linear_attn.conv1d.weight"
    write_checkpoint(tmp_path, CONFIG, {**mixed, name: REFERENCE[name]})
    with pytest.raises(CheckpointError, match="two conventions"):
        plan_conversion(open_source(tmp_path))
