"""Sources that are not converted: each is refused by name, with the way out."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm_engine.checkpoint.index import CheckpointIndex
from minivllm_engine.conversion import open_source, plan_conversion
from minivllm_engine.conversion.explaining import proposal
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.model_config.config import ModelConfig
from support.converted import convert_to
from support.tiny_checkpoint import random_tensors, tiny_config, write_checkpoint

CONFIG = tiny_config()
REFERENCE = random_tensors(CONFIG)


def refused(path: Path, **opening) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        plan_conversion(open_source(path, **opening))
    assert caught.value.hint or caught.value.why, "a refusal says why, or what to do"
    return caught.value


NAMES = {
    "model.layers.0.mlp.gate_proj.qweight": ("quantised", "Dequantise"),
    "model.layers.0.mlp.gate_proj.weight_scale_inv": ("quantised", "Dequantise"),
    "model.layers.0.mlp.gate_proj.weight_packed": ("quantised", "Dequantise"),
    "model.layers.0.mlp.gate_proj.biases": ("quantised", "Dequantise"),
    "model.layers.0.mlp.gate_proj.weight.quant_state.bitsandbytes__nf4": ("quantised", "Dequant"),
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": ("LoRA", "Merge"),
    "model.layers.0.mlp.experts.0.up_proj.weight": ("mixture-of-experts", "dense"),
    "model.layers.0.mlp.shared_expert_gate.weight": ("mixture-of-experts", "dense"),
    "model.layers.0.attn.f_proj.0.weight": ("Kimi Delta Attention", "Gated DeltaNet"),
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": ("Kimi Delta Attention", "Gated"),
    "model.layers.0.linear_attn.k_conv1d.weight": ("OLMo-Hybrid", "Qwen3.5"),
    "model.layers.0.attention_layer_norm.weight": ("OLMo-Hybrid", "Qwen3.5"),
    "model.layers.0.attn.q_conv1d.bias": ("a bias", "conv_bias"),
    "blk.0.ssm_a": ("GGUF", "Hugging Face"),
    "decoder.layers.0.self_attention.linear_qgkv.weight": ("Megatron", "Export"),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_that_cannot_be_converted(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, {**REFERENCE, name: torch.zeros(2)})
    error = refused(tmp_path)
    assert name in error.what
    assert NAMES[name][0] in str(error.why)
    assert NAMES[name][1] in str(error.hint)


def test_a_name_is_matched_by_whole_segments_only(tmp_path: Path) -> None:
    """`experts_scale` is no `experts`: unknown, and not mistaken for a mixture of experts."""
    name = "model.layers.0.mlp.experts_scale"
    write_checkpoint(tmp_path, CONFIG, {**REFERENCE, name: torch.zeros(2)})
    (problem,) = plan_conversion(open_source(tmp_path)).problems
    assert (problem.kind, problem.name) == ("unmatched", name)


@pytest.mark.parametrize(
    ("dtype", "word", "what", "remedy"),
    [
        (torch.int8, "I8", "quantised", "Dequantise"),
        (torch.uint8, "U8", "quantised", "Dequantise"),
        (torch.float8_e4m3fn, "F8_E4M3", "quantised", "Dequantise"),
        (torch.int32, "I32", "whole numbers", "tensor.float()"),
        (torch.int64, "I64", "whole numbers", "tensor.float()"),
        (torch.bool, "BOOL", "a mask", "the weight itself"),
        (torch.complex64, "C64", "complex numbers", "real floats"),
    ],
)
@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_types_that_cannot_be_converted(
    kind: str, dtype: torch.dtype, word: str, what: str, remedy: str, tmp_path: Path
) -> None:
    name = "model.layers.1.linear_attn.A_log"
    tensors = {**REFERENCE, name: REFERENCE[name].to(dtype)}
    write_checkpoint(tmp_path, CONFIG, tensors)
    if kind == "torch":
        (tmp_path / "model.safetensors").unlink()
        torch.save(tensors, tmp_path / "model.pt")
    error = refused(tmp_path)
    assert f"1 tensor of type {word}" in error.what and name in str(error.why)
    assert what in str(error.why) and remedy in str(error.hint)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8"])
def test_a_config_that_says_quantised(method: str, tmp_path: Path) -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": method}}
    write_checkpoint(tmp_path, config, REFERENCE)
    error = refused(tmp_path)
    assert f"quantised ({method})" in error.what and "Dequantise" in str(error.hint)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("qwen3_5_moe_text", "mixture-of-experts"),
        ("kimi_linear", "Kimi Delta Attention"),
        ("olmo_hybrid", "post-norm"),
        ("lara_mini", "sliding-window"),
    ],
)
def test_configs_of_relatives(model_type: str, why: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**CONFIG, "model_type": model_type}, REFERENCE)
    assert why in str(refused(tmp_path).why)


def test_gguf_files_and_adapters(tmp_path: Path) -> None:
    gguf, adapter = tmp_path / "a", tmp_path / "b"
    gguf.mkdir()
    (gguf / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    for path in (gguf, gguf / "model-Q4_K_M.gguf"):
        error = refused(path)
        assert "is a GGUF file" in error.what and "Hugging Face" in str(error.hint)
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    save_file({"x": torch.zeros(1)}, adapter / "adapter_model.safetensors")
    error = refused(adapter)
    assert "LoRA adapter" in error.what and "merge_and_unload" in str(error.hint)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_git_lfs_pointers(suffix: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, REFERENCE)
    (tmp_path / "model.safetensors").unlink()
    file = tmp_path / f"model.{suffix}"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 8\n")
    error = refused(tmp_path)
    assert str(file) in error.what and "Git LFS" in str(error.why)
    assert error.hint == "git lfs pull"


def test_a_tokenizer_that_is_a_git_lfs_pointer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, REFERENCE)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid 4d\n")
    error = refused(tmp_path)
    assert error.what == f"{tmp_path / 'tokenizer.json'} is not there in full"
    assert error.hint == "git lfs pull"


@pytest.mark.parametrize("left", [0, 5, 1000, -1])  # -1: all but the last byte
def test_torn_shards(left: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, REFERENCE, shards=3)
    file = tmp_path / "model-00002-of-00003.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:left])
    error = refused(tmp_path)
    assert error.what == f"{file} is truncated"
    assert "Copy the file again" in str(error.hint)


def edit_index(path: Path, change) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


SIZE = sum(tensor.numel() * 4 for tensor in REFERENCE.values())
LIES = {
    "total_size": (lambda i: i.update(metadata={"total_size": SIZE - 4}), f"{SIZE - 4:,} bytes"),
    "another_shard": (
        lambda i: i["weight_map"].update({"model.norm.weight": "model-00001-of-00003.safetensors"}),
        "it lies in model-0000",
    ),
    "no_such_tensor": (
        lambda i: i["weight_map"].update({"ghost": "model-00001-of-00003.safetensors"}),
        "no shard holds it",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies(lie: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, REFERENCE, shards=3)
    edit_index(tmp_path, lambda i: i.update(metadata={"total_size": SIZE}))
    assert plan_conversion(open_source(tmp_path)).ok
    change, why = LIES[lie]
    edit_index(tmp_path, change)
    error = refused(tmp_path)
    assert "does not describe its shards" in error.what and why in str(error.why)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert plan_conversion(open_source(tmp_path)).ok


def test_the_index_decides_which_file_a_tensor_is_read_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An overlay file takes the place of what lies in a shard; a leftover counts for nothing, and is told."""
    src = write_checkpoint(tmp_path / "src", CONFIG, REFERENCE, shards=2)
    name = "model.norm.weight"
    save_file(
        {name: REFERENCE[name] + 1, "leftover.weight": torch.zeros(2)},
        src / "overlay.safetensors",
    )
    edit_index(src, lambda i: i["weight_map"].update({name: "overlay.safetensors"}))
    source = open_source(src)
    (note,) = [note for note in source.notes if "leaves out 2 tensors" in note]
    assert name in note and "leftover.weight" in note
    convert_to(src, tmp_path / "dst")
    written = load_file(tmp_path / "dst/model.safetensors")
    assert torch.equal(written[name], REFERENCE[name] + 1)
    index = CheckpointIndex.open(src)
    index.check(ModelConfig.from_dir(src))
    assert index.entries[name].file.name == "overlay.safetensors"
    assert "leaves out 2 tensors" in caplog.text
    edit_index(src, lambda i: i["weight_map"].pop(name))
    (problem,) = plan_conversion(open_source(src)).problems
    assert (problem.kind, problem.name) == ("missing", name)


def test_names_of_peft_around_a_head(tmp_path: Path) -> None:
    """The one that was trained and saved counts, and the one that it was before is left out."""
    tensors = dict(REFERENCE)
    head = tensors.pop("lm_head.weight")
    tensors["lm_head.original_module.weight"] = head - 1
    tensors["lm_head.modules_to_save.default.weight"] = head
    src = write_checkpoint(tmp_path / "src", CONFIG, tensors)
    plan = plan_conversion(open_source(src))
    assert plan.ok and [tensor.rule for tensor in plan.dropped] == ["peft-original"]
    convert_to(src, tmp_path / "dst")
    assert torch.equal(load_file(tmp_path / "dst/model.safetensors")["lm_head.weight"], head)
    index = CheckpointIndex.open(src)
    index.check(ModelConfig.from_dir(src))
    assert index.entries["lm_head.weight"].name == "lm_head.modules_to_save.default.weight"
    # Where only another adapter's is there, nothing says that the head could be tied.
    tensors["lm_head.modules_to_save.mine.weight"] = tensors.pop(
        "lm_head.modules_to_save.default.weight"
    )
    src = write_checkpoint(tmp_path / "other", CONFIG, tensors)
    text = proposal(plan_conversion(open_source(src))).text
    with pytest.raises(CheckpointError) as caught:
        CheckpointIndex.open(src).check(ModelConfig.from_dir(src))
    assert "tie_word_embeddings" not in text + str(caught.value.hint)


def test_an_index_that_names_a_missing_shard(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, REFERENCE, shards=3)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    error = refused(tmp_path)
    assert "lacks 1 of 3 shards" in error.what
    assert error.why == "model-00003-of-00003.safetensors"


def test_two_files_with_one_tensor(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, REFERENCE, shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    second = tmp_path / "model-00002-of-00002.safetensors"
    save_file({**load_file(second), "lm_head.weight": REFERENCE["lm_head.weight"]}, second)
    first = tmp_path / "model-00001-of-00002.safetensors"
    save_file({**load_file(first), "lm_head.weight": REFERENCE["lm_head.weight"]}, first)
    error = refused(tmp_path)
    assert "two files hold the tensor lm_head.weight" in error.what
    assert str(error.why) == f"{first} and {second}"


def test_two_names_for_one_target(tmp_path: Path) -> None:
    twice = {**REFERENCE, "module.model.norm.weight": REFERENCE["model.norm.weight"].clone()}
    write_checkpoint(tmp_path, CONFIG, twice)
    (problem,) = plan_conversion(open_source(tmp_path)).problems
    assert (problem.kind, problem.name) == ("two_sources", "model.norm.weight")
    assert "module.model.norm.weight" in problem.detail


def test_links_in_a_circle_and_to_nowhere(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "src", CONFIG, REFERENCE)
    loop = tmp_path / "loop"
    os.symlink(tmp_path / "pool", loop)
    os.symlink(loop, tmp_path / "pool")
    error = refused(loop)
    assert str(loop) in error.what and "symbolic links" in str(error.why)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        kept = tmp_path / "kept"
        file = path / name
        if file.exists():
            file.rename(kept)
        os.symlink(file.name, file)
        error = refused(path)
        assert str(file) in error.what and "a link to" in str(error.why), name
        file.unlink()
        if kept.exists():
            kept.rename(file)
    os.symlink(tmp_path / "gone.json", path / "tokenizer.json")
    assert "gone.json" in str(refused(path).why)


def test_links_to_blobs_are_followed(tmp_path: Path) -> None:
    """As in a Hugging Face cache."""
    path = write_checkpoint(tmp_path / "src", CONFIG, REFERENCE)
    for name in ("config.json", "model.safetensors"):
        (path / name).rename(tmp_path / f"blob-{name}")
        os.symlink(Path("..") / f"blob-{name}", path / name)
    assert plan_conversion(open_source(path)).ok


def test_nothing_to_convert(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere").what
    assert "has no weights (found: nothing)" in refused(tmp_path).what
    (tmp_path / "notes.txt").write_text("x")
    assert "1 *.txt" in refused(tmp_path).what
    assert "no file of weights" in refused(tmp_path / "notes.txt").what
    write_checkpoint(tmp_path, CONFIG, {})
    assert "holds no tensor at all" in refused(tmp_path).what
    write_checkpoint(tmp_path, CONFIG, REFERENCE)
    assert "--ema is for files of torch.save" in refused(tmp_path, ema=True).what
    (tmp_path / "config.json").write_text("{]")
    assert "config.json cannot be read" in refused(tmp_path).what
