"""Refusals of plans and targets, and what the loader and the check say of the same."""

import json
import shlex
from pathlib import Path

import pytest
import torch

from minivllm_engine.checkpoint.index import CheckpointIndex
from minivllm_engine.conversion import (
    ConvertOptions,
    Plan,
    check,
    open_source,
    plan_conversion,
)
from minivllm_engine.conversion.explaining import proposal
from minivllm_engine.core.errors import CheckpointError, ConversionError
from minivllm_engine.model_config.config import ModelConfig
from support.converted import convert_to
from support.tiny_checkpoint import nested, random_tensors, tiny_config, write_checkpoint

CONFIG = tiny_config()
REFERENCE = random_tensors(CONFIG)


def plan_of(tensors, path: Path, config=CONFIG, **options) -> Plan:
    return plan_conversion(
        open_source(write_checkpoint(path, config, tensors)), ConvertOptions(**options)
    )


def test_layers_that_the_config_does_not_have(tmp_path: Path) -> None:
    tensors = dict(REFERENCE)
    for i in (4, 5):
        tensors |= {
            n.replace(".0.", f".{i}."): t.clone() for n, t in REFERENCE.items() if ".0." in n
        }
    tensors["model.layers.5.rotor.weight"] = torch.zeros(2)
    plan = plan_of(tensors, tmp_path)
    assert {problem.kind for problem in plan.problems} == {"unmatched"}
    for problem in plan.problems:
        assert problem.detail == "the config has 4 layers (0-3)" and not problem.nearest
        assert "--model-config" in problem.remedy
    assert plan.problems[0].name.startswith("model.layers.{4,5}.")
    # A model that lacks layers would run: nothing proposes it.
    assert "--allow" not in proposal(plan).text
    with pytest.raises(CheckpointError) as caught:
        CheckpointIndex.open(tmp_path).check(ModelConfig.from_dir(tmp_path))
    assert "(the config has 4 layers (0-3))" in str(caught.value.why)
    assert "nearest" not in str(caught.value.why)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_vocabulary_that_is_not_the_configs(name: str, tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    tensors["model.embed_tokens.weight"] = torch.zeros(333, 64)
    (problem,) = plan_of(tensors, tmp_path, config).problems
    assert problem.detail == "is [333, 64], config.json asks for [320, 64]"
    assert problem.remedy.startswith('"vocab_size": 333 in config.json')
    assert plan_of(tensors, tmp_path, {**config, "vocab_size": 333}).ok


def test_a_convolution_without_its_third_dimension(tmp_path: Path) -> None:
    """Whether it stood first or last says whether norms hold w or 1 + w: the source has to."""
    name = "model.layers.1.linear_attn.conv1d.weight"
    tensors = {**REFERENCE, name: REFERENCE[name].squeeze(1)}
    (problem,) = plan_of(tensors, tmp_path).problems
    assert (problem.kind, problem.name) == ("wrong_shape", name)
    assert "is [192, 4]" in problem.detail and "tensor.unsqueeze(1)" in problem.remedy
    with pytest.raises(CheckpointError, match=r"unsqueeze\(1\)"):
        CheckpointIndex.open(tmp_path).check(ModelConfig.from_dir(tmp_path))


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards_without_an_index(kind: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, {})
    (tmp_path / "model.safetensors").unlink()
    start = "model" if kind == "safetensors" else "pytorch_model"
    names = sorted(REFERENCE)
    for i in range(3):
        part = {name: REFERENCE[name] for name in names[i::3]}
        file = tmp_path / f"{start}-0000{i + 1}-of-00003.{kind}"
        if kind == "bin":
            torch.save(part, file)
        else:
            from safetensors.torch import save_file

            save_file(part, file)
    assert plan_conversion(open_source(tmp_path)).ok
    with pytest.raises(CheckpointError, match="is one of 3 shards") as caught:
        open_source(file)
    assert str(tmp_path) in str(caught.value.hint)
    (tmp_path / f"{start}-00002-of-00003.{kind}").unlink()
    refusals = [lambda: open_source(tmp_path)]
    if kind == "safetensors":
        refusals.append(lambda: CheckpointIndex.open(tmp_path))
    for attempt in refusals:
        with pytest.raises(CheckpointError, match="lacks 1 of 3 shards") as caught:
            attempt()
        assert caught.value.why == f"{start}-00002-of-00003.{kind}"
        assert "Copy the missing files" in str(caught.value.hint)


def test_what_is_incomplete_is_said_by_all_alike(tmp_path: Path) -> None:
    tensors = dict(REFERENCE)
    name = "model.layers.3.self_attn.k_norm.weight"
    whole = write_checkpoint(tmp_path / "whole", CONFIG, tensors)
    del tensors[name]
    src = write_checkpoint(tmp_path / "src", CONFIG, tensors)
    (problem,) = plan_conversion(open_source(src)).problems
    assert problem.remedy == f"a source that holds {name}"
    plan = plan_conversion(open_source(src), ConvertOptions(allow_missing=(name,)))
    assert plan.ok and plan.missing == (name,)
    assert any("marked incomplete" in note and name in note for note in plan.notes)
    dst = tmp_path / "dst"
    convert_to(src, dst, allow_missing=(name,))
    assert json.loads((dst / "minivllm_manifest.json").read_text())["missing"] == [name]
    report = check(open_source(src), dst)
    assert [(d.kind, d.name) for d in report.differences] == [("incomplete", name)]
    with pytest.raises(CheckpointError) as caught:
        CheckpointIndex.open(dst).check(ModelConfig.from_dir(dst))
    assert "--allow-missing and is incomplete" in str(caught.value.hint)
    assert "--check" not in str(caught.value.hint)
    convert_to(whole, dst, overwrite=True)  # as the loader says
    CheckpointIndex.open(dst).check(ModelConfig.from_dir(dst))
    assert check(open_source(whole), dst).ok


def test_check_does_not_pass_what_the_loader_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = write_checkpoint(tmp_path / "src", CONFIG, REFERENCE)
    convert_to(src, tmp_path / "dst")

    def refuse(self: CheckpointIndex, config: ModelConfig) -> None:
        raise CheckpointError("no", why="because\nof this", hint="x")

    monkeypatch.setattr(CheckpointIndex, "check", refuse)
    (difference,) = check(open_source(src), tmp_path / "dst").differences
    assert (difference.kind, difference.detail) == ("refused", "no: because")


def test_check_of_what_is_not_there(tmp_path: Path) -> None:
    src = write_checkpoint(tmp_path / "src", CONFIG, REFERENCE)
    dst = tmp_path / "my dst"
    with pytest.raises(CheckpointError) as caught:
        check(open_source(src), dst)
    command = f"minivllm convert-weights SRC {shlex.quote(str(dst))}"
    assert caught.value.hint == f"Convert first: {command}"
    (tmp_path / "my dst.partial").mkdir()
    with pytest.raises(CheckpointError) as caught:
        check(open_source(src), dst)
    assert str(caught.value.hint).endswith(f"{command} --resume")
    (tmp_path / "my dst.partial").rmdir()
    convert_to(src, dst)
    for broken in ({}, {"kind": "manifest", "shards": [{}]}, {"kind": "manifest", "shards": []}):
        (dst / "minivllm_manifest.json").write_text(json.dumps(broken))
        with pytest.raises(CheckpointError) as caught:
            check(open_source(src), dst)
        assert str(caught.value.hint).endswith(f"{command} --overwrite")


@pytest.mark.parametrize("nesting", ["flat", "nested"])
@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3", "qwen2_moe", "gpt_neox", "mamba2", "gemma3_text"]
)
def test_another_architecture_whose_shapes_fit(
    model_type: str, nesting: str, tmp_path: Path
) -> None:
    config = tiny_config(model_type=model_type)
    content = nested(config) if nesting == "nested" else config
    src = write_checkpoint(tmp_path, content, REFERENCE)
    for attempt in (
        lambda: plan_conversion(open_source(src)),
        lambda: ModelConfig.from_dir(src),
    ):
        with pytest.raises(CheckpointError) as caught:
            attempt()
        assert f"model_type '{model_type}' is another architecture" in caught.value.what
        assert '"model_type": "qwen3_5_text"' in str(caught.value.hint)
    assert plan_of(REFERENCE, tmp_path, tiny_config(model_type="qwen3_5_text")).ok


@pytest.mark.parametrize(
    "model_type", ["my_hybrid", "optimus", "yields", "qwen3_6_text", "miniqwen", None]
)
def test_names_of_no_known_architecture_are_taken_by_their_keys(
    model_type: str | None, tmp_path: Path
) -> None:
    plan = plan_of(REFERENCE, tmp_path, tiny_config(model_type=model_type))
    assert plan.ok
    told = any(f"model_type '{model_type}' is not known" in note for note in plan.notes)
    assert told == (model_type in ("my_hybrid", "optimus", "yields"))


def test_a_foreign_config_over_tensors_of_fla(tmp_path: Path) -> None:
    from support.fla_model import FlaModel, fla_config

    src = FlaModel(fla_config()).save(tmp_path / "src")
    config = json.loads((src / "config.json").read_text())
    (src / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(CheckpointError, match="another architecture"):
        plan_conversion(open_source(src))


def test_the_first_of_each_kind_is_in_the_error(tmp_path: Path) -> None:
    tensors = {**REFERENCE, "extra.weight": torch.zeros(2)}
    tensors["model.norm.weight"] = torch.zeros(65)
    src = write_checkpoint(tmp_path / "src", CONFIG, tensors)
    with pytest.raises(ConversionError) as caught:
        convert_to(src, tmp_path / "dst")
    assert caught.value.what == "1 unmatched, 1 of a wrong shape; nothing written"
    assert "--allow-unmatched extra.weight" in str(caught.value.hint)
    assert "--model-config FILE" in str(caught.value.hint)
