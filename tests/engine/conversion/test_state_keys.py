"""Which entry of a file of torch.save holds the weights: whatever its keys look like, it can be named."""

import re
import shlex
import warnings
from pathlib import Path

import pytest
import torch

from minivllm_engine.conversion.reader import TensorReader
from minivllm_engine.conversion.source import open_source
from minivllm_engine.conversion.torch_file import load_torch_file
from minivllm_engine.core.errors import CheckpointError
from support.tiny_checkpoint import random_tensors, tiny_config, write_checkpoint

A, B = {"a": torch.zeros(2)}, {"b": torch.ones(3)}


def saved(path: Path, content: object) -> Path:
    torch.save(content, path / "c.pt")
    return path / "c.pt"


def refused(file: Path, **opening) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_torch_file(file, **opening)
    return caught.value


def option_in(hint: str | None) -> str | None:
    """The key that a hint names, as a shell reads it."""
    found = re.search(r"--state-key ('.*?'(?!\w)|\S+)", str(hint))
    return None if found is None else shlex.split(found[1])[0]


KEYS = {
    "a dot": ({"run.v2": A, "other": B}, "run.v2", ("run.v2",)),
    "dots inside levels": (
        {"x": {"run.v2": {"y.z": A}}, "n": B},
        "x.run.v2.y.z",
        ("x", "run.v2", "y.z"),
    ),
    "the longest key first": ({"p": {"q": B}, "p.q": A}, "p.q", ("p.q",)),
    "back from a blind alley": ({"p.q": {"s": B}, "p": {"q.r": A}}, "p.q.r", ("p", "q.r")),
    "bytes": ({b"mine": A, "other": B}, "mine", ("mine",)),
    "bytes that are no text": ({b"\xff": A, "other": B}, "\\xff", ("\\xff",)),
    "a number": ({0: A, 1: B}, "0", ("0",)),
    "a space": ({"my weights": A, "other": B}, "my weights", ("my weights",)),
    "not ASCII": ({"权重": A, "other": B}, "权重", ("权重",)),
}


@pytest.mark.parametrize("case", KEYS)
def test_any_key_can_be_named(case: str, tmp_path: Path) -> None:
    content, state_key, entered = KEYS[case]
    file = saved(tmp_path, content)
    weights = load_torch_file(file, state_key=state_key)
    assert weights.entered == entered and list(weights.tensors) == ["a"]
    again = load_torch_file(file, path=weights.entered)  # as when its values are read
    assert list(again.tensors) == ["a"]
    # Without the option the error proposes one that works, if there is one to propose.
    found = option_in(refused(file).hint)
    assert found is not None
    assert load_torch_file(file, state_key=found).tensors.keys() <= {"a", "b"}


def test_containers_under_bytes_are_recognised(tmp_path: Path) -> None:
    content = {b"model_state_dict": {b"a": torch.zeros(2)}, b"optimizer": {}, b"step": 3}
    weights = load_torch_file(saved(tmp_path, content))
    assert weights.entered == ("model_state_dict",) and list(weights.tensors) == ["a"]


def test_two_keys_of_one_text(tmp_path: Path) -> None:
    for content in ({1: A, "1": B}, {b"x": A, "x": B}, {"w": torch.zeros(1), b"w": torch.ones(1)}):
        error = refused(saved(tmp_path, content))
        assert "two entries that are called" in error.what and "--state-key" not in str(error.hint)


@pytest.mark.parametrize("inside", [(), ("run.v2",)])
def test_two_sets_of_weights_below_a_key(inside: tuple[str, ...], tmp_path: Path) -> None:
    """The key that is proposed is the whole way, and is not what was given before."""
    content: object = {"state_dict": A, "net": B}
    for key in inside:
        content = {key: content}
    given = ".".join(inside) or None
    file = saved(tmp_path, content)
    error = refused(file, state_key=given)
    assert "2 sets of weights: state_dict, net" in error.what
    proposed = option_in(error.hint)
    assert proposed not in (None, given)
    assert list(load_torch_file(file, state_key=proposed).tensors) == ["a"]


def test_tensors_beside_a_container_below_a_key(tmp_path: Path) -> None:
    file = saved(tmp_path, {"run": {"model": A, "lm_head": {"weight": torch.ones(1)}}})
    error = refused(file, state_key="run")
    assert option_in(error.hint) == "run.model"
    assert list(load_torch_file(file, state_key="run.model").tensors) == ["a"]


def test_no_key_is_proposed_where_none_works(tmp_path: Path) -> None:
    for content in ({"step": 3}, {"optimizer": {}}, {"": A}, {"\x1b[2J": A}):
        error = refused(saved(tmp_path, content))
        assert "--state-key" not in str(error.hint) and "model.state_dict()" in str(error.hint)
    error = refused(saved(tmp_path, {"x": 3}), state_key="x")
    assert "no container 'x'" in error.what and "Leave --state-key out" in str(error.hint)
    assert refused(saved(tmp_path, [A]), state_key="0").hint


def test_a_key_that_is_not_there_names_one_that_is(tmp_path: Path) -> None:
    file = saved(tmp_path, {"run.v2": A, "step": 3})
    error = refused(file, state_key="run")
    assert "keys at its first level: run.v2, step" in str(error.why)
    assert option_in(error.hint) == "run.v2"


def test_parts_that_keep_their_weights_elsewhere(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    names = sorted(tensors)
    src = write_checkpoint(tmp_path / "src", tiny_config(), {})
    (src / "model.safetensors").unlink()
    for i, wrap in enumerate((lambda t: t, lambda t: {"model": t})):
        part = {name: tensors[name] for name in names[i::2]}
        torch.save(wrap(part), src / f"pytorch_model-0000{i + 1}-of-00002.bin")
    with pytest.raises(CheckpointError, match="elsewhere than the files before it") as caught:
        open_source(src)
    assert caught.value.why == "under model, not under no key"
    torch.save(
        {"model": {name: tensors[name] for name in names[0::2]}},
        src / "pytorch_model-00001-of-00002.bin",
    )
    source = open_source(src)
    with TensorReader.of(source) as reader:
        for entry in source.tensors[::9]:
            assert torch.equal(reader.read(entry), tensors[entry.name])


@pytest.mark.filterwarnings("error")
def test_quantised_tensors_are_refused_without_torchs_warnings(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
        file = saved(tmp_path, {"model": {"w": quantised}})
    error = refused(file)
    assert "w is a quantised tensor" in error.what and "dequantize" in str(error.hint)
    sparse = saved(tmp_path, {"model": {"w": torch.eye(3).to_sparse()}})
    error = refused(sparse)
    assert "w is a sparse tensor" in error.what and "to_dense" in str(error.hint)
