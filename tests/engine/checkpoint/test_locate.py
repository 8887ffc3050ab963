"""MODEL: a path, `demo`, or what Hugging Face's libraries have downloaded; nothing is downloaded here."""

import os
import shutil
from pathlib import Path

import pytest

from minivllm_engine.checkpoint.index import resolve_model
from minivllm_engine.checkpoint.locate import hub_cache, local_checkpoints, locate
from minivllm_engine.conversion import open_source
from minivllm_engine.core.errors import CheckpointError
from support.tiny_checkpoint import random_tensors, tiny_config, write_checkpoint

REVISION = "0a" * 20


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one model, its files links to blobs."""
    hub = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    root = hub / "models--org--tiny"
    written = write_checkpoint(tmp_path / "m", tiny_config(), random_tensors(tiny_config()))
    snapshot = root / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    for file in written.iterdir():
        shutil.move(file, root / "blobs" / file.name)
        os.symlink(Path("../../blobs") / file.name, snapshot / file.name)
    (root / "refs").mkdir()
    (root / "refs/main").write_text(REVISION)
    return hub


def refused(model: str | Path) -> CheckpointError:
    """The error, which the loader and the converter give alike."""
    said = []
    for attempt in (resolve_model, open_source):
        with pytest.raises(CheckpointError) as caught:
            attempt(model)
        said.append((caught.value.what, caught.value.why, caught.value.hint))
    assert said[0] == said[1]
    return caught.value


def test_an_id_and_the_root_of_a_cache_are_its_snapshot(hub: Path, tmp_path: Path) -> None:
    snapshot = hub / "models--org--tiny/snapshots" / REVISION
    os.symlink(hub / "models--org--tiny", tmp_path / "models--link")
    for model in ("org/tiny", hub / "models--org--tiny", tmp_path / "models--link"):
        assert os.path.samefile(resolve_model(model), snapshot)
        assert os.path.samefile(open_source(model).directory, snapshot)
    assert local_checkpoints() == ["org/tiny"]


def test_refs_decide_which_snapshot(hub: Path) -> None:
    root = hub / "models--org--tiny"
    shutil.copytree(root / "snapshots" / REVISION, root / "snapshots/ffff")
    assert locate("org/tiny").name == REVISION
    (root / "refs/main").unlink()
    error = refused("org/tiny")
    assert "2 snapshots and no refs/main" in error.what and "ffff" in str(error.hint)
    shutil.rmtree(root / "snapshots/ffff")
    assert locate("org/tiny").name == REVISION
    for revision in ("none", "../..", "", "a\0b"):
        (root / "refs/main").write_text(revision)
        assert refused("org/tiny").hint == (
            "Nothing is downloaded. To have it in the cache: hf download org/tiny"
        )


def test_a_directory_is_meant_before_an_id(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org/tiny").mkdir(parents=True)
    assert locate("org/tiny") == Path("org/tiny")


def test_an_id_that_is_not_there_tells_how_to_have_it(hub: Path) -> None:
    error = refused("Qwen/Qwen3.5-0.8B")
    assert error.what == "Qwen/Qwen3.5-0.8B does not exist"
    assert str(error.hint).endswith("hf download Qwen/Qwen3.5-0.8B")
    assert "Nothing is downloaded" in str(error.hint) and "demo, org/tiny" in str(error.why)
    hint = str(refused("org/tinny").hint)
    assert "hf download org/tinny; or did you mean org/tiny?" in hint
    assert refused("dmo").hint == "Did you mean demo?"
    for path in ("./nowhere", "/nowhere/at/all", "a/b/c", "~nobody-of-that-name/x", "x\ny"):
        error = refused(path)
        assert "does not exist" in error.what and "hf download" not in str(error.hint)


def test_models_beside_a_wrong_path_are_named(hub: Path, tmp_path: Path) -> None:
    for name in ("good", "better"):
        write_checkpoint(tmp_path / name, tiny_config(), random_tensors(tiny_config()))
    error = refused(tmp_path / "goood")
    assert error.hint == f"Did you mean {tmp_path / 'good'}?"
    assert str(tmp_path / "better") in str(error.why)


def test_home_and_links_are_followed(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model = write_checkpoint(tmp_path / "here", tiny_config(), random_tensors(tiny_config()))
    assert resolve_model("~/here") == model
    os.symlink(model, tmp_path / "link")
    assert os.path.samefile(resolve_model("~/link"), model)
    os.symlink("gone", tmp_path / "dangling")
    assert "link to gone" in str(refused("~/dangling").why)


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub_cache() == tmp_path / ".cache/huggingface/hub"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert hub_cache() == tmp_path / "x/huggingface/hub"
    monkeypatch.setenv("HF_HOME", "~/hf")
    assert hub_cache() == tmp_path / "hf/hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "own"))
    assert hub_cache() == tmp_path / "own" and local_checkpoints() == []


def test_what_is_no_model_is_said_alike(tmp_path: Path) -> None:
    gguf, adapter = tmp_path / "a", tmp_path / "b"
    gguf.mkdir()
    adapter.mkdir()
    (gguf / "x.gguf").write_bytes(b"GGUF")
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    for path in (gguf, gguf / "x.gguf"):
        assert refused(path).what == f"{gguf / 'x.gguf'} is a GGUF file"
    assert "merge_and_unload" in str(refused(adapter).hint)
    model = write_checkpoint(tmp_path / "m", tiny_config(), random_tensors(tiny_config()))
    for name in ("tokenizer.json", "config.json"):
        (model / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d\n")
        assert refused(model).hint == "git lfs pull"
        (model / name).unlink()


def test_what_lies_there_is_counted_by_kind(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "other.dir").mkdir()
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"found: 2 folders, 1 \*\.txt"):
        resolve_model(tmp_path)
