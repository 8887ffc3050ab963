"""Loading: every tensor arrives where it belongs, in the right dtype, from every layout."""

from pathlib import Path

import pytest
import torch

from minivllm_engine.checkpoint.index import CheckpointIndex
from minivllm_engine.checkpoint.names import expected_tensors
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.models.miniqwen import MiniQwenForCausalLM
from minivllm_engine.runner.weights import load_weights
from support.packed_runner import CPU, PackedRunner, load_model
from support.tiny_checkpoint import (
    BARE,
    NESTED_TWICE,
    OFFICIAL,
    TEXT,
    nested,
    official_dtypes,
    random_tensors,
    tiny_config,
    write_checkpoint,
)
from support.transformers_oracle import TransformersOracle

IDS = [5, 300, 17, 17, 0, 219]


def loaded_views(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return load_model(path, dtype).checkpoint_views()


def logits(model: MiniQwenForCausalLM, ids: list[int] = IDS) -> torch.Tensor:
    return PackedRunner(model).run(ids).all_logits


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("prefix", [OFFICIAL, TEXT, BARE, NESTED_TWICE])
def test_g1_every_layout_holds_the_same_model(prefix: str, shards: int, tmp_path: Path) -> None:
    config = tiny_config()
    content = nested(config) if prefix == OFFICIAL else config
    tensors = random_tensors(config)
    write_checkpoint(tmp_path, content, random_tensors(config, prefix=prefix), shards=shards)
    views = loaded_views(tmp_path)
    assert views.keys() == tensors.keys()
    for name, view in views.items():
        assert torch.equal(view.reshape(tensors[name].shape), tensors[name]), name


def test_the_model_has_exactly_the_expected_tensors() -> None:
    for changes in ({}, {"attention_bias": True}, {"linear_num_value_heads": 6}):
        config = ModelConfig.from_dict(tiny_config(**changes), "config.json")
        model = MiniQwenForCausalLM(config, dtype=torch.float32, device=CPU)
        expected = {
            name: tuple(size for _, size in dims) for name, dims in expected_tensors(config).items()
        }
        views = model.checkpoint_views()
        assert views.keys() == expected.keys()
        for name, view in views.items():
            assert view.numel() == torch.Size(expected[name]).numel(), name


def test_every_weight_is_filled_by_exactly_one_tensor(tmp_path: Path) -> None:
    config = tiny_config(attention_bias=True)
    path = write_checkpoint(tmp_path, config, random_tensors(config))
    model = MiniQwenForCausalLM(ModelConfig.from_dir(path), dtype=torch.float32, device=CPU)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    load_weights(model, CheckpointIndex.open(path))
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total == sum(view.numel() for view in model.checkpoint_views().values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", ["official", "fp32", "all_bf16"])
def test_e10_dtype_of_every_loaded_tensor(dtype: torch.dtype, stored: str, tmp_path: Path) -> None:
    """What decides the decay, and the DeltaNet norm, stay fp32 whatever the model and the file are."""
    config, tensors = tiny_config(), random_tensors(tiny_config())
    if stored == "official":
        tensors = official_dtypes(tensors)
    elif stored == "all_bf16":
        tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    write_checkpoint(tmp_path, config, tensors)
    views = loaded_views(tmp_path, dtype)
    kept = ("A_log", "dt_bias", "linear_attn.norm.weight")
    for name, view in views.items():
        assert view.dtype == (torch.float32 if name.endswith(kept) else dtype), name
        assert torch.equal(view.reshape(-1), tensors[name].reshape(-1).to(view.dtype)), name
    assert sum(name.endswith(kept) for name in views) == 9


def test_g4_logits_are_not_uniform(tmp_path: Path) -> None:
    for tie in (True, False):
        config = tiny_config(tie_word_embeddings=tie)
        path = write_checkpoint(tmp_path / str(tie), config, random_tensors(config))
        assert logits(load_model(path)).std(dim=-1).min() > 0.3


@pytest.mark.parametrize("prefix", [OFFICIAL, TEXT, BARE])
@pytest.mark.parametrize("copy", ["absent", "present"])
def test_g5_a_tied_head_is_the_embedding(prefix: str, copy: str, tmp_path: Path) -> None:
    """Logits equal hidden state times embedding: those of the same file with the head spelled out."""
    config = tiny_config(tie_word_embeddings=True)
    tensors = random_tensors(config, prefix=prefix)
    embedding = tensors[f"{prefix}embed_tokens.weight"]
    head = {"lm_head.weight": embedding.clone()}
    path = write_checkpoint(
        tmp_path / "tied", config, tensors if copy == "absent" else {**tensors, **head}
    )
    tied = load_model(path)
    assert tied.head is tied.embedding
    untied_config = tiny_config(tie_word_embeddings=False)
    untied = load_model(write_checkpoint(tmp_path / "untied", untied_config, {**tensors, **head}))
    assert untied.head is not untied.embedding
    assert torch.equal(logits(tied), logits(untied))


def test_a_head_of_its_own_counts_although_the_config_says_tied(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    head = {"lm_head.weight": torch.randn(320, 64)}
    path = write_checkpoint(tmp_path / "a", config, {**random_tensors(config), **head})
    untied_config = tiny_config(tie_word_embeddings=False)
    untied = write_checkpoint(tmp_path / "b", untied_config, {**random_tensors(config), **head})
    assert torch.equal(logits(load_model(path)), logits(load_model(untied)))


@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
def test_e16_one_layer_of_each_type_against_transformers(kind: str, tmp_path: Path) -> None:
    """Query and gate lie side by side for each head; q, k, v, z, b and a one after the other."""
    config = tiny_config(num_hidden_layers=1, layer_types=[kind], linear_num_value_heads=6)
    path = write_checkpoint(tmp_path, config, random_tensors(config, seed=5))
    expected = TransformersOracle(path).logits(IDS)
    torch.testing.assert_close(logits(load_model(path)), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
def test_models_of_one_kind_of_layer_only(kind: str, tmp_path: Path) -> None:
    """No attention layer, or no DeltaNet layer: chunks and single steps all the same."""
    config = tiny_config(num_hidden_layers=3, layer_types=[kind] * 3)
    path = write_checkpoint(tmp_path, config, random_tensors(config))
    expected = TransformersOracle(path).logits(IDS)
    for chunks in ((6,), (1,), (2, 3, 1)):
        row = PackedRunner(load_model(path)).run(IDS, *chunks)
        torch.testing.assert_close(row.all_logits, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(value: float, tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    path = write_checkpoint(tmp_path, tiny_config(), tensors)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight .* not finite"):
        load_model(path)


def test_progress_counts_bytes_up_to_the_total(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, tiny_config(), random_tensors(tiny_config()), shards=2)
    index = CheckpointIndex.open(path)
    model = MiniQwenForCausalLM(ModelConfig.from_dir(path), dtype=torch.float32, device=CPU)
    calls: list[tuple[str, int, int]] = []
    load_weights(model, index, progress=lambda *call: calls.append(call))
    assert {phase for phase, _, _ in calls} == {"weights"}
    done = [done for _, done, _ in calls]
    assert done == sorted(done)
    assert calls[-1] == ("weights", index.weight_bytes, index.weight_bytes)


def test_the_loader_checks_names_and_shapes_itself(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    del tensors["model.norm.weight"]
    path = write_checkpoint(tmp_path, tiny_config(), tensors)
    with pytest.raises(CheckpointError, match=r"missing: model\.norm\.weight"):
        load_model(path)
