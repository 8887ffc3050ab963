"""Files of torch.save: containers, wrappers, and nothing but tensors."""

import argparse
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from minivllm_engine.conversion import open_source, plan_conversion
from minivllm_engine.conversion.torch_file import load_torch_file
from minivllm_engine.core.errors import CheckpointError
from support.byte_tokenizer import write_byte_tokenizer
from support.converted import IDS, convert_to, engine_logits
from support.tiny_checkpoint import random_tensors, tiny_config, write_checkpoint
from support.transformers_oracle import TransformersOracle

TOLERANCE = 2e-4
CONFIG = tiny_config()
REFERENCE = random_tensors(CONFIG)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> TransformersOracle:
    return TransformersOracle(
        write_checkpoint(tmp_path_factory.mktemp("reference"), CONFIG, REFERENCE)
    )


@pytest.fixture(scope="module")
def expected(reference: TransformersOracle) -> torch.Tensor:
    return reference.logits(IDS)


def write_config(path: Path, **changes) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(tiny_config(**changes)))
    return path


def converts_to(src: Path, dst: Path, expected: torch.Tensor, **opening) -> None:
    convert_to(src, dst, opening=opening)
    torch.testing.assert_close(engine_logits(dst), expected, rtol=0, atol=TOLERANCE)


class Unloadable:
    """Pickled, it opens a file when it is loaded: proof that it never is."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_training_export_with_its_pickled_config(
    reference: TransformersOracle, expected: torch.Tensor, tmp_path: Path
) -> None:
    """MiniQwen's `model.pt` beside `config.json` and `config.pt`: the latter is never opened."""
    src = write_config(tmp_path / "src")
    torch.save(reference.model.state_dict(), src / "model.pt")
    with (src / "config.pt").open("wb") as file:
        pickle.dump(Unloadable(tmp_path / "executed"), file)
    write_byte_tokenizer(src)
    converts_to(src, tmp_path / "dst", expected)
    assert not (tmp_path / "executed").exists()
    assert (tmp_path / "dst/tokenizer.json").read_bytes() == (src / "tokenizer.json").read_bytes()


def test_a_training_checkpoint_with_its_optimizer(
    reference: TransformersOracle, expected: torch.Tensor, tmp_path: Path
) -> None:
    model = reference.model
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    checkpoint = {
        "epoch": 1,
        "global_step": 200,
        "loss": 2.5,
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "value_state_dict": {"head.weight": torch.ones(4)},
    }
    file = tmp_path / "runs/checkpoint-200.pt"
    file.parent.mkdir()
    torch.save(checkpoint, file)
    with pytest.raises(CheckpointError, match=r"no config\.json") as caught:
        open_source(file)
    assert "--model-config" in str(caught.value.hint)
    config = write_config(tmp_path / "elsewhere") / "config.json"
    converts_to(file, tmp_path / "dst", expected, model_config=config)


class Wrapped(nn.Module):
    """A module under the name that a trainer gives it."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)


def compiled_layers(model: nn.Module) -> nn.Module:
    layers = nn.ModuleList(Wrapped("_orig_mod", layer) for layer in model.model.layers)
    backbone = nn.Module()
    for name, child in model.model.named_children():
        backbone.add_module(name, layers if name == "layers" else child)
    whole = nn.Module()
    whole.model, whole.lm_head = backbone, model.lm_head
    return Wrapped("_fsdp_wrapped_module", whole)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "data_parallel": nn.DataParallel,
    "compiled_data_parallel": lambda m: Wrapped("_orig_mod", nn.DataParallel(m)),
    "data_parallel_compiled": lambda m: nn.DataParallel(Wrapped("_orig_mod", m)),
    "compiled_layers_in_fsdp": compiled_layers,
    "lightning": lambda m: Wrapped("_forward_module", Wrapped("model", m)),
    "peft": lambda m: Wrapped("base_model", Wrapped("model", m)),
    "checkpointed": lambda m: Wrapped("_checkpoint_wrapped_module", m),
    "hand_written": lambda m: Wrapped("transformer", m),
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("container", [(), ("state_dict",), ("module", "model")])
def test_wrapped_modules_in_containers(
    name: str,
    container: tuple[str, ...],
    reference: TransformersOracle,
    expected: torch.Tensor,
    tmp_path: Path,
) -> None:
    content: dict = dict(WRAPPERS[name](reference.model).state_dict())
    assert set(content) != set(reference.model.state_dict())
    for key in reversed(container):
        content = {key: content, "step": 3, "rng_state": torch.zeros(3)}
    src = write_config(tmp_path / "src")
    torch.save(content, src / "pytorch_model.bin")
    assert open_source(src).entered == container
    converts_to(src, tmp_path / "dst", expected)


def test_sharded_bin_files(expected: torch.Tensor, tmp_path: Path) -> None:
    src = write_config(tmp_path / "src")
    names = sorted(REFERENCE)
    weight_map = {}
    for i in range(2):
        file = f"pytorch_model-0000{i + 1}-of-00002.bin"
        torch.save({name: REFERENCE[name] for name in names[i::2]}, src / file)
        weight_map |= dict.fromkeys(names[i::2], file)
    index = {"metadata": {}, "weight_map": weight_map}
    (src / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    converts_to(src, tmp_path / "dst", expected)


def test_weights_that_share_or_transpose_memory(expected: torch.Tensor, tmp_path: Path) -> None:
    """Views of one storage, and a matrix stored transposed, are written by value."""
    src = write_config(tmp_path / "src")
    tensors = dict(REFERENCE)
    both = torch.cat([tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]])
    tensors["model.embed_tokens.weight"], tensors["lm_head.weight"] = both.chunk(2)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].t().contiguous().t()
    torch.save(tensors, src / "model.pt")
    converts_to(src, tmp_path / "dst", expected)


def test_two_sets_of_weights_need_a_word(expected: torch.Tensor, tmp_path: Path) -> None:
    src = write_config(tmp_path / "src")
    other = {name: tensor + 1 for name, tensor in REFERENCE.items()}
    torch.save({"state_dict": REFERENCE, "net": other}, src / "model.pt")
    with pytest.raises(CheckpointError, match="2 sets of weights: state_dict, net") as caught:
        open_source(src)
    assert caught.value.hint == "Say which one: --state-key state_dict"
    converts_to(src, tmp_path / "dst", expected, state_key="state_dict")
    with pytest.raises(CheckpointError, match="no container 'weights'"):
        open_source(src, state_key="weights")


def test_averaged_weights_only_where_asked_for(expected: torch.Tensor, tmp_path: Path) -> None:
    src = write_config(tmp_path / "src")
    other = {name: tensor + 1 for name, tensor in REFERENCE.items()}
    torch.save({"model": other, "ema": REFERENCE}, src / "model.pt")
    assert open_source(src).entered == ("model",)
    converts_to(src, tmp_path / "dst", expected, ema=True)
    torch.save({"model": REFERENCE}, src / "model.pt")
    with pytest.raises(CheckpointError, match="no averaged weights"):
        open_source(src, ema=True)


def test_python_objects_are_refused_and_never_executed(tmp_path: Path) -> None:
    src = write_config(tmp_path / "src")
    torch.save({"model": REFERENCE, "args": Unloadable(tmp_path / "executed")}, src / "model.pt")
    with pytest.raises(CheckpointError, match="Python objects beside tensors"):
        open_source(src)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("left", [0, 3, 100, -1, -20_000])
def test_torn_files(left: int, tmp_path: Path) -> None:
    src = write_config(tmp_path / "src")
    torch.save(REFERENCE, src / "model.pt")
    content = (src / "model.pt").read_bytes()
    (src / "model.pt").write_bytes(content[:left] if left >= 0 else content[: len(content) + left])
    with pytest.raises(CheckpointError) as caught:
        open_source(src)
    assert "model.pt" in caught.value.what
    assert "Copy the file again" in str(caught.value.hint)


@pytest.mark.parametrize("content", [[torch.ones(2)], {"step": 3}, {"optimizer": {}}])
def test_files_without_weights(content, tmp_path: Path) -> None:
    src = write_config(tmp_path / "src")
    torch.save(content, src / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt holds no"):
        open_source(src)


def test_which_file_is_read_is_said(tmp_path: Path) -> None:
    src = write_checkpoint(tmp_path / "src", CONFIG, REFERENCE)
    torch.save(REFERENCE, src / "model.pt")
    source = open_source(src)
    assert source.format == "safetensors"
    assert source.notes == (f"{src}: model.pt passed over: the safetensors are read",)
    (src / "model.safetensors").unlink()
    torch.save(REFERENCE, src / "step-9.pt")
    assert open_source(src).files == (src / "model.pt",)
    (src / "model.pt").rename(src / "step-8.pt")
    with pytest.raises(CheckpointError, match="holds 2 checkpoints"):
        open_source(src)


@pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="counts pages as Linux shows them"
)
def test_planning_reads_no_data(tmp_path: Path) -> None:
    """Only headers are touched: pages of a mapped file stay on the disk."""
    src = write_config(tmp_path / "src", vocab_size=50_000, tie_word_embeddings=True)
    big = {name: t for name, t in REFERENCE.items() if name != "lm_head.weight"}
    big["model.embed_tokens.weight"] = torch.zeros(50_000, 64)
    torch.save(big, src / "model.pt")

    def resident() -> int:
        fields = Path("/proc/self/smaps").read_text().split(str(src / "model.pt"))[1:]
        return sum(int(part.split("Rss:")[1].split()[0]) for part in fields)

    from minivllm_engine.conversion.torch_file import load_torch_file

    weights = load_torch_file(src / "model.pt")
    before = resident()
    assert plan_conversion(open_source(src)).ok
    assert before < 2_000 and resident() < 2_000, "KiB of 12,800 are in memory"
    assert weights.tensors["model.embed_tokens.weight"].sum() == 0
    assert resident() > 10_000


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"model": {"a": torch.zeros(2)}, "lm_head": {"weight": torch.ones(2)}}, "lm_head"),
        ({"model": {"a": torch.zeros(2)}, "lm_head.weight": torch.ones(2)}, "lm_head.weight"),
        ({"a": torch.zeros(2), "extra": {"deep": {"b": torch.ones(2)}}}, "extra"),
        ({"a": torch.zeros(2, device="meta")}, "meta device"),
    ],
)
def test_no_tensor_is_lost_without_a_word(content: dict, named: str, tmp_path: Path) -> None:
    file = tmp_path / "c.pt"
    torch.save(content, file)
    with pytest.raises(CheckpointError, match=named):
        load_torch_file(file)


def test_what_trainers_keep_beside_the_weights_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "c.pt"
    rest = {
        "optimizer_state_dict": {"state": {0: {"m": torch.zeros(2)}}},
        "ema": {"a": torch.ones(2)},
    }
    torch.save({"model": {"a": torch.zeros(2)}, "rng_state": torch.zeros(3), **rest}, file)
    assert load_torch_file(file).tensors["a"].tolist() == [0, 0]
    extra = {"model": {"a": torch.zeros(2)}, "critic": {"b": torch.ones(2)}}
    torch.save(extra, file)
    assert set(load_torch_file(file, state_key="model").tensors) == {"a"}


def test_a_pickled_object_is_named_and_torch_not_quoted(tmp_path: Path) -> None:
    file = tmp_path / "c.pt"
    torch.save({"model": {"a": torch.zeros(2)}, "args": argparse.Namespace(lr=1)}, file)
    with pytest.raises(CheckpointError) as caught:
        load_torch_file(file)
    assert caught.value.why == "it names argparse.Namespace"
