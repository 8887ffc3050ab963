"""Sources that transformers writes itself, and targets that it reads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from minivllm_engine.conversion import check, open_source, plan_conversion
from minivllm_engine.core.errors import ConversionError
from minivllm_engine.model_config.config import ModelConfig
from support.converted import IDS, convert_to, engine_logits, files_of
from support.tiny_checkpoint import random_tensors, tiny_config, write_checkpoint
from support.transformers_oracle import Qwen3_5Config, Qwen3_5TextConfig, TransformersOracle

TOLERANCE = 2e-4
CONFIG = tiny_config()
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
    "patch_size": 4,
}


def unlike_its_start(model: torch.nn.Module) -> torch.nn.Module:
    """Every parameter of a text model off the value that it was initialised with."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            parameter.data = torch.rand(parameter.shape, generator=generator) * 3 - 2
        elif name.endswith("dt_bias"):
            parameter.data = 0.7 * noise - 1
        elif name.endswith("linear_attn.norm.weight"):
            parameter.data = 1 + 0.3 * noise
        elif parameter.ndim == 1:
            parameter.data = 0.3 * noise
        elif name.endswith("conv1d.weight"):
            parameter.data = 0.5 * noise
        else:
            parameter.data = noise * parameter.shape[-1] ** -0.5
    return model.eval()


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.tensor([IDS]), use_cache=False).logits[0]


def text_model(**changes) -> torch.nn.Module:
    from transformers import Qwen3_5ForCausalLM

    return unlike_its_start(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**tiny_config(**changes))))


def multimodal_model(*, tied: bool) -> torch.nn.Module:
    from transformers import Qwen3_5ForConditionalGeneration

    text = {k: v for k, v in CONFIG.items() if k != "architectures"}
    text["tie_word_embeddings"] = tied
    config = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=tied)
    return unlike_its_start(Qwen3_5ForConditionalGeneration(config))


def names_in(path: Path) -> list[str]:
    with safe_open(path / "model.safetensors", framework="pt") as file:
        return sorted(file.keys())


@pytest.mark.parametrize("tied", [True, False])
def test_text_model_from_scratch(tied: bool, tmp_path: Path) -> None:
    model = text_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "src")
    assert all(
        name.startswith(("model.layers", "model.embed", "model.norm", "lm_head"))
        for name in names_in(tmp_path / "src")
    )
    convert_to(tmp_path / "src", tmp_path / "dst")
    torch.testing.assert_close(
        engine_logits(tmp_path / "dst"), logits_of(model), rtol=0, atol=TOLERANCE
    )
    torch.testing.assert_close(
        TransformersOracle(tmp_path / "dst").logits(IDS), logits_of(model), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("tied", [True, False])
def test_multimodal_model_and_its_text_class_saved_again(tied: bool, tmp_path: Path) -> None:
    """Vision tensors are dropped by a named rule; the text class writes `model.language_model.` again."""
    from transformers import AutoModelForCausalLM

    model = multimodal_model(tied=tied)
    model.save_pretrained(tmp_path / "full")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "full", dtype=torch.float32)
    again.save_pretrained(tmp_path / "text")
    assert "model.language_model.norm.weight" in names_in(tmp_path / "text")
    expected = logits_of(model)
    for name, has_vision in (("full", True), ("text", False)):
        plan = plan_conversion(open_source(tmp_path / name))
        vision = [row for row in plan.rows if row.rule == "text-only"]
        assert [row.source for row in vision] == (["model.visual.**"] if has_vision else [])
        assert sum(row.count for row in vision) == sum(
            "visual" in tensor for tensor in names_in(tmp_path / name)
        )
        dst = tmp_path / f"{name}-dst"
        assert len(convert_to(tmp_path / name, dst, max_shard_bytes=300_000).shards) > 2
        torch.testing.assert_close(engine_logits(dst), expected, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(TransformersOracle(dst).logits(IDS), expected, rtol=0, atol=1e-6)
    assert files_of(tmp_path / "full-dst") == files_of(tmp_path / "text-dst")


def test_bare_backbone_with_a_config_of_its_own(tmp_path: Path) -> None:
    model = text_model(tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path / "src")
    assert "norm.weight" in names_in(tmp_path / "src")
    convert_to(tmp_path / "src", tmp_path / "dst")
    torch.testing.assert_close(
        engine_logits(tmp_path / "dst"), logits_of(model), rtol=0, atol=TOLERANCE
    )


def test_qwen3_next_is_interleaved_because_its_model_type_says_so(tmp_path: Path) -> None:
    """Its dense form: the fused projections of the 80B, without experts."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    text = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type")}
    config = Qwen3NextConfig(**text, mlp_only_layers=[0, 1, 2, 3], num_experts=4)
    model = unlike_its_start(Qwen3NextForCausalLM(config))
    model.save_pretrained(tmp_path / "src")
    assert "model.layers.0.linear_attn.in_proj_qkvz.weight" in names_in(tmp_path / "src")
    plan = plan_conversion(open_source(tmp_path / "src"))
    assert plan.ok and "interleaved" in plan.style
    convert_to(tmp_path / "src", tmp_path / "dst")
    expected = logits_of(model)
    torch.testing.assert_close(engine_logits(tmp_path / "dst"), expected, rtol=0, atol=TOLERANCE)
    convert_to(tmp_path / "src", tmp_path / "wrong", qkvz_layout="concat")
    assert (engine_logits(tmp_path / "wrong") - expected).abs().max() > 0.05


@pytest.mark.parametrize("adapter_saved", ["clone", "different"])
def test_a_second_copy_of_a_tied_head(adapter_saved: str, tmp_path: Path) -> None:
    """MiniQwen's adapter writes the head twice; only a true copy is dropped."""
    model = text_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "src")
    file = tmp_path / "src/model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    if adapter_saved == "different":
        head[-1, -1] += 0.5
    save_file({**tensors, "lm_head.weight": head}, file, metadata={"format": "pt"})
    assert [d.rule for d in plan_conversion(open_source(tmp_path / "src")).dropped] == ["tied-head"]
    report = convert_to(tmp_path / "src", tmp_path / "dst")
    config = json.loads((tmp_path / "dst/config.json").read_text())
    is_copy = adapter_saved == "clone"
    assert ("lm_head.weight" in names_in(tmp_path / "dst")) == (not is_copy)
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is is_copy
    assert any("differs from the embedding" in note for note in report.notes) == (not is_copy)
    expected = logits_of(model)
    if not is_copy:
        model.lm_head.weight = torch.nn.Parameter(head)
        expected = logits_of(model)
    torch.testing.assert_close(engine_logits(tmp_path / "dst"), expected, rtol=0, atol=TOLERANCE)
    assert check(open_source(tmp_path / "src"), tmp_path / "dst").ok


def test_every_second_head_is_compared(tmp_path: Path) -> None:
    """Of two heads in the file one is a copy; the other is not, and is not dropped in silence."""
    config = tiny_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    head = tensors["model.embed_tokens.weight"]
    tensors |= {"lm_head.weight": head.clone(), "module.lm_head.weight": head + 1}
    src = write_checkpoint(tmp_path / "src", config, tensors)
    with pytest.raises(ConversionError, match="1 with two sources"):
        convert_to(src, tmp_path / "dst")


@pytest.mark.parametrize("form", ["flat", "nested", "miniqwen", "transformers_4", "yarn"])
def test_every_form_of_config_becomes_one_nested_form(form: str, tmp_path: Path) -> None:
    text = tiny_config(eos_token_id=7)
    rope = text["rope_parameters"]
    if form == "miniqwen":
        del text["rope_parameters"], text["layer_types"]
        text |= {"rope_theta": 1e7, "partial_rotary_factor": 0.25}
    elif form == "transformers_4":
        del text["rope_parameters"], text["dtype"]
        text |= {"torch_dtype": "float32", "rope_theta": 1e7}
        text["rope_scaling"] = {"type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.25}
        text["rope_scaling"]["original_max_position_embeddings"] = 2048
    elif form == "yarn":
        rope |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    content = dict(text)
    if form == "nested":
        content = {"model_type": "qwen3_5", "text_config": text, "eos_token_id": [7, 9]}
        content |= {"vision_config": VISION, "image_token_id": 300, "tie_word_embeddings": False}
    src = tmp_path / "src"
    src.mkdir()
    (src / "config.json").write_text(json.dumps(content))
    save_file(random_tensors(CONFIG), src / "model.safetensors")
    convert_to(src, tmp_path / "dst")
    written = json.loads((tmp_path / "dst/config.json").read_text())
    assert set(written) == {"architectures", "model_type", "text_config", "tie_word_embeddings"}
    assert written["text_config"]["eos_token_id"] == ([7, 9] if form == "nested" else 7)
    before = ModelConfig.from_dict(content, "before")
    assert ModelConfig.from_dir(tmp_path / "dst") == before
    assert TransformersOracle(tmp_path / "dst").model.config.rope_parameters["rope_theta"] == 1e7
    torch.testing.assert_close(
        engine_logits(tmp_path / "dst"),
        TransformersOracle(src).logits(IDS) if form != "miniqwen" else engine_logits(src),
        rtol=0,
        atol=TOLERANCE,
    )
