"""What a model directory holds, and one clear error for everything that can be wrong with it."""

import json
import logging
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm_engine.checkpoint.index import CheckpointIndex, resolve_model
from minivllm_engine.checkpoint.safetensors_header import read_header
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.model_config.config import ModelConfig
from support.tiny_checkpoint import (
    BARE,
    NESTED_TWICE,
    OFFICIAL,
    TEXT,
    random_tensors,
    tiny_config,
    write_checkpoint,
    write_tiny_checkpoint,
)

CONFIG = ModelConfig.from_dict(tiny_config(), "config.json")
TIED = ModelConfig.from_dict(tiny_config(tie_word_embeddings=True), "config.json")


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return random_tensors(tiny_config())


def message_of(path: Path, config: ModelConfig = CONFIG) -> str:
    """The error of resolving, opening and checking `path`: what, why and hint."""
    with pytest.raises(CheckpointError) as caught:
        CheckpointIndex.open(resolve_model(path)).check(config)
    text = str(caught.value)
    assert "Traceback" not in text
    return text


# -- directories and files -----------------------------------------------------------------------


def test_the_demo_model_is_in_the_package() -> None:
    path = resolve_model("demo")
    CheckpointIndex.open(path).check(ModelConfig.from_dir(path))


def test_missing_directory(tmp_path: Path) -> None:
    assert f"{tmp_path / 'nowhere'} does not exist" in message_of(tmp_path / "nowhere")


def test_a_hub_name_is_not_downloaded() -> None:
    assert "Nothing is downloaded" in message_of("Qwen/Qwen3.5-0.8B")


def test_a_file_instead_of_its_directory(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path)
    assert "is a file" in message_of(path / "model.safetensors")


def test_empty_directory(tmp_path: Path) -> None:
    assert "is empty" in message_of(tmp_path)


def test_no_config(tmp_path: Path) -> None:
    (write_tiny_checkpoint(tmp_path) / "config.json").unlink()
    message = message_of(tmp_path)
    assert "no config.json" in message
    assert "convert-weights" not in message
    (tmp_path / "model.safetensors").rename(tmp_path / "model.pt")
    message = message_of(tmp_path)
    assert "no config.json (found: 1 *.pt)" in message
    assert message.endswith(f"minivllm convert-weights {tmp_path} DST --model-config FILE")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "final.pth"])
def test_only_pickled_weights(name: str, tmp_path: Path) -> None:
    """They are named, not opened: the file would run code if it were unpickled."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    (tmp_path / name).write_bytes(b"cos\nabort\n(tR.")
    message = message_of(tmp_path)
    assert name in message
    assert message.endswith(f"minivllm convert-weights {tmp_path} DST")


def test_no_weights_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    assert "no *.safetensors" in message_of(tmp_path)


@pytest.mark.parametrize("left", [0, 5, 8, 100, -1, -10_000])
def test_truncated_file(left: int, tmp_path: Path) -> None:
    file = write_tiny_checkpoint(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:left] if left >= 0 else content[: len(content) + left])
    message = message_of(tmp_path)
    assert f"{file} is truncated" in message
    assert "Copy the file again" in message


def header(text: str | bytes, data: bytes = b"") -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw + data


GARBAGE = {
    "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\n",
    "no_json": header("{]"),
    "no_utf8": header(b'{"\xff": 1}'),
    "a_list": header("[1, 2]"),
    "an_entry_of_nothing": header('{"a": 3}'),
    "no_offsets": header('{"a": {"dtype": "F32", "shape": [1]}}', b"1234"),
    "offsets_backwards": header('{"a": {"dtype": "F32", "shape": [0], "data_offsets": [4, 0]}}'),
    "offsets_of_text": header('{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}'),
    "shape_and_bytes_disagree": header(
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', b"1234"
    ),
    "shape_negative": header('{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}'),
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_garbage_instead_of_safetensors(content: bytes, tmp_path: Path) -> None:
    file = write_tiny_checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(content)
    assert f"{file} is not a safetensors file" in message_of(tmp_path)


def test_sharded(tensors, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(), tensors, shards=3)
    index = CheckpointIndex.open(resolve_model(tmp_path))
    index.check(CONFIG)
    assert len({entry.file for entry in index.entries.values()}) == 3
    assert index.weight_bytes == sum(t.numel() * 4 for t in tensors.values())


def test_index_naming_a_missing_shard(tensors, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(), tensors, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    message = message_of(tmp_path)
    assert "lacks 1 of 3 shards" in message
    assert "model-00002-of-00003.safetensors" in message


@pytest.mark.parametrize(
    "content", ["{}", "[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 1}}']
)
def test_index_that_is_none(content: str, tensors, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(), tensors, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "is not an index of safetensors" in message_of(tmp_path)


def test_shards_without_an_index(tensors, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(), tensors, shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    CheckpointIndex.open(resolve_model(tmp_path)).check(CONFIG)


def test_the_same_tensor_in_two_shards(tensors, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(), tensors, shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()  # it would decide
    second = tmp_path / "model-00002-of-00002.safetensors"
    name = "model.norm.weight"
    save_file(
        {**load_file(second), name: tensors[name], "lm_head.weight": tensors["lm_head.weight"]},
        second,
    )
    message = message_of(tmp_path)
    assert "two tensors for" in message
    assert "model-00001" in message and "model-00002" in message


def test_two_names_for_one_tensor(tensors, tmp_path: Path) -> None:
    twice = {**tensors, "model.language_model.norm.weight": tensors["model.norm.weight"].clone()}
    write_checkpoint(tmp_path, tiny_config(), twice)
    assert "two tensors for model.norm.weight" in message_of(tmp_path)


def test_single_file_beside_an_index(
    tensors, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, tiny_config(), tensors, shards=2)
    write_checkpoint(tmp_path, tiny_config(), tensors)
    index = CheckpointIndex.open(resolve_model(tmp_path))
    assert {entry.file.name for entry in index.entries.values()} == {"model.safetensors"}
    assert "holds both" in caplog.text


# -- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix",
    [
        OFFICIAL,
        TEXT,
        BARE,
        NESTED_TWICE,
        "language_model.model.",
        "model.model.",
        "module._orig_mod.model.",
        "base_model.model.model.",
        "transformer.",
    ],
)
def test_g1_every_prefix_gives_the_same_names(prefix: str, tensors, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(), random_tensors(tiny_config(), prefix=prefix))
    index = CheckpointIndex.open(tmp_path)
    index.check(CONFIG)
    assert set(index.entries) == set(tensors)
    assert index.num_skipped == 0


def test_vision_and_mtp_are_skipped_and_counted(tensors, tmp_path: Path) -> None:
    extra = {
        name: torch.zeros(2)
        for name in (
            "model.visual.blocks.0.attn.qkv.weight",
            "model.language_model.visual.pos_embed.weight",
            "visual.merger.norm.weight",
            "vision_tower.x.weight",
            "mtp.layers.0.self_attn.q_proj.weight",
            "mtp.fc.weight",
            "model.mtp_head.weight",
        )
    }
    write_checkpoint(tmp_path, tiny_config(), {**tensors, **extra})
    index = CheckpointIndex.open(tmp_path)
    index.check(CONFIG)
    assert index.num_skipped == len(extra)
    assert index.weight_bytes == sum(t.numel() * 4 for t in tensors.values())


def test_no_text_tensor_at_all(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(), {"model.visual.a.weight": torch.zeros(2)})
    message = message_of(tmp_path)
    assert "no text tensor" in message
    assert "1 of its vision" in message


def test_an_empty_file_of_tensors(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(), {})
    assert "no text tensor" in message_of(tmp_path)


REFUSED = {
    "model.layers.0.mlp.experts.3.gate_proj.weight": "mixture-of-experts",
    "model.layers.0.mlp.experts.gate_up_proj": "mixture-of-experts",
    "model.layers.0.mlp.shared_expert.up_proj.weight": "mixture-of-experts",
    "model.layers.0.mlp.gate_proj.weight_scale": "quantised",
    "model.layers.0.mlp.gate_proj.weight_scale_inv": "quantised",
    "model.layers.0.mlp.gate_proj.qweight": "quantised",
    "model.layers.0.mlp.gate_proj.scales": "quantised",
    "base_model.model.layers.0.mlp.gate_proj.lora_A.weight": "LoRA",
    "model.layers.0.linear_attn.f_a_proj.weight": "Kimi Delta Attention",
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": "Kimi Delta Attention",
    "model.layers.0.linear_attn.q_conv1d.weight": "OLMo-Hybrid",
    "blk.0.ssm_conv1d.weight": "GGUF",
    "decoder.layers.0.self_attention.in_proj.weight": "Megatron",
}


@pytest.mark.parametrize("name", REFUSED)
def test_layouts_that_are_refused_with_the_reason(name: str, tensors, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(), {**tensors, name: torch.zeros(2)})
    message = message_of(tmp_path)
    assert name in message
    assert REFUSED[name] in message


FOREIGN = {
    "model.layers.0.linear_attn.in_proj_qkvz.weight": "qkvz-interleaved",
    "model.layers.0.attn.q_conv1d.weight": "fla",
    "model.layers.0.mixer.A_log": "mixer",
    "model.layers.0.mlp.gate_up_proj.weight": "gate-up",
    "model.embeddings.weight": "fla",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_layouts_of_other_producers_are_left_to_the_conversion(
    name: str, tensors, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, tiny_config(), {**tensors, name: torch.zeros(2)})
    with pytest.raises(CheckpointError) as caught:
        CheckpointIndex.open(tmp_path)
    assert name in str(caught.value)
    assert f"({FOREIGN[name]})" in str(caught.value)
    assert caught.value.hint == f"minivllm convert-weights {tmp_path} DST"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int32, torch.bool])
def test_number_types_that_are_refused_by_name(dtype: torch.dtype, tensors, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    write_checkpoint(tmp_path, tiny_config(), {**tensors, name: tensors[name].to(dtype)})
    message = message_of(tmp_path)
    stored = {
        torch.int8: "I8",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.int32: "I32",
        torch.bool: "BOOL",
    }
    assert f"type {stored[dtype]}" in message
    assert name in message


# -- what the config asks for --------------------------------------------------------------------


def test_missing_unexpected_and_misshapen_tensors_in_one_report(tensors, tmp_path: Path) -> None:
    changed = dict(tensors)
    for i in range(4):
        changed[f"model.layers.{i}.mlp.up_projection.weight"] = changed.pop(
            f"model.layers.{i}.mlp.up_proj.weight"
        )
    del changed["model.layers.2.linear_attn.A_log"]
    changed["model.rotary_embedding.inverse"] = torch.zeros(3)
    changed["model.norm.weight"] = torch.zeros(65)
    write_checkpoint(tmp_path, tiny_config(), changed)
    lines = message_of(tmp_path).splitlines()
    assert (
        "missing: model.layers.{0,1,2,3}.mlp.up_proj.weight "
        "(nearest: model.layers.*.mlp.up_projection.weight)"
    ) in lines
    assert "missing: model.layers.2.linear_attn.A_log" in lines
    assert "unexpected: model.rotary_embedding.inverse" in lines
    assert any(
        line.startswith("unexpected: model.layers.{0,1,2,3}.mlp.up_projection") for line in lines
    )
    assert "misshapen: model.norm.weight is [65], config.json asks for [64] (hidden_size)" in lines


def test_vocabulary_and_embedding_that_disagree(tensors, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(vocab_size=400), tensors)
    message = message_of(tmp_path, ModelConfig.from_dir(tmp_path))
    assert "model.embed_tokens.weight is [320, 64]" in message
    assert "[400, 64] (vocab_size, hidden_size)" in message
    assert "The embedding has 320 rows, vocab_size is 400: use the config.json" in message


def test_layer_types_that_disagree_with_the_layers(tensors, tmp_path: Path) -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention", "linear_attention"]
    write_checkpoint(tmp_path, tiny_config(layer_types=kinds), tensors)
    message = message_of(tmp_path, ModelConfig.from_dir(tmp_path))
    assert "missing: model.layers.0.self_attn.q_proj.weight" in message
    assert "unexpected: model.layers.0.linear_attn.A_log" in message


def test_an_mlx_conversion_is_recognised(tensors, tmp_path: Path) -> None:
    moved = {
        name: tensor.movedim(1, 2).contiguous() if name.endswith("conv1d.weight") else tensor
        for name, tensor in tensors.items()
    }
    write_checkpoint(tmp_path, tiny_config(), moved)
    message = message_of(tmp_path)
    assert "linear_attn.conv1d.weight is [192, 4, 1]" in message
    assert f"minivllm convert-weights {tmp_path} DST (these are weights of an MLX" in message


def test_a_converted_checkpoint_that_lost_a_tensor_can_be_compared_with_its_source(
    tensors, tmp_path: Path
) -> None:
    fewer = {name: tensor for name, tensor in tensors.items() if "A_log" not in name}
    write_checkpoint(tmp_path, tiny_config(), fewer)
    assert "Use the config.json that came with" in message_of(tmp_path)
    (tmp_path / "minivllm_manifest.json").write_text("{}")
    assert message_of(tmp_path).endswith(f"minivllm convert-weights SRC {tmp_path} --check")


def test_biases_must_be_there_if_the_config_says_so(tensors, tmp_path: Path) -> None:
    biased = ModelConfig.from_dict(tiny_config(attention_bias=True), "config.json")
    write_checkpoint(tmp_path, tiny_config(), tensors)
    assert "missing: model.layers.3.self_attn.q_proj.bias" in message_of(tmp_path, biased)


# -- the output head -----------------------------------------------------------------------------


def head_of(tensors, path: Path, config: ModelConfig, head: torch.Tensor | None) -> bool:
    """Whether the head is the embedding, for a file with this lm_head.weight."""
    changed = {name: t for name, t in tensors.items() if name != "lm_head.weight"}
    if head is not None:
        changed["lm_head.weight"] = head
    write_checkpoint(path, tiny_config(), changed)
    index = CheckpointIndex.open(path)
    index.check(config)
    return index.is_tied(config)


def test_head_absent(tensors, tmp_path: Path) -> None:
    assert head_of(tensors, tmp_path, TIED, None)
    message = message_of(tmp_path, CONFIG)
    assert "missing: lm_head.weight" in message
    assert '"tie_word_embeddings": true' in message


def test_head_present_and_equal(tensors, tmp_path: Path) -> None:
    embedding = tensors["model.embed_tokens.weight"].clone()
    assert head_of(tensors, tmp_path, TIED, embedding)
    assert not head_of(tensors, tmp_path, CONFIG, embedding)


def test_head_present_and_different(
    tensors, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    embedding = tensors["model.embed_tokens.weight"].clone()
    embedding[-1, -1] += 1
    assert not head_of(tensors, tmp_path, CONFIG, embedding)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert not head_of(tensors, tmp_path, TIED, embedding)
    assert "differs from the embedding" in caplog.text


@pytest.mark.parametrize("metadata", [{"a": 5}, {"a": None}, [], 3, {"a": {"b": "c"}}])
def test_metadata_that_readers_refuse(metadata: object, tmp_path: Path) -> None:
    raw = json.dumps({"__metadata__": metadata}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    with pytest.raises(CheckpointError, match="is not a safetensors file") as caught:
        read_header(tmp_path / "x.safetensors")
    assert "__metadata__" in str(caught.value.why)
