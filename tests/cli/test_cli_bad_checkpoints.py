"""Checkpoints that cannot be loaded: one clear error that names the thing, before torch is there."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import minivllm_engine
from cli.program import Program

DEMO = Path(minivllm_engine.__file__).parent / "demo"


def _config(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def breaks(model: Path) -> None:
        path = model / "config.json"
        document = json.loads(path.read_text())
        change(document.get("text_config", document))
        path.write_text(json.dumps(document))

    return breaks


def _weights(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def breaks(model: Path) -> None:
        path = model / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return breaks


def _drop(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def _missing_shard(model: Path) -> None:
    index = {
        "metadata": {},
        "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"},
    }
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def _only_pickle(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("breaks", "named"),
    [
        (_drop("config.json"), "config.json"),
        (_drop("model.safetensors"), "safetensors"),
        (_only_pickle, "pytorch_model.bin"),
        (_drop("tokenizer.json"), "tokenizer.json"),
        (_missing_shard, "model-00001-of-00002.safetensors"),
        (_weights(lambda data: data[: len(data) // 2]), "truncated"),
        (_weights(lambda data: data.replace(b"A_log", b"A_lug", 1)), "A_log"),
        (_config(lambda c: c.update(vocab_size=4096)), "embed_tokens"),
        (_config(lambda c: c.update(layer_types=["full_attention", "mamba"])), "layer_types"),
        (lambda model: (model / "config.json").write_text("{"), "config.json"),
        (lambda model: (model / "generation_config.json").write_text("[]"), "generation_config"),
    ],
)
def test_k24_what_is_wrong_is_named_and_nothing_is_run(
    program: Program, breaks: Callable[[Path], object], named: str
) -> None:
    model = program.home / "model"
    model.mkdir()
    for file in DEMO.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    breaks(model)
    source = program.write_lines("in", [{"messages": [{"role": "user", "content": "Hi"}]}])
    done = program.run_here("generate", "model", "-i", source, "-o", "out")
    assert done.code == 2
    assert done.out == ""
    assert named in done.err
    assert "Traceback" not in done.err
    errors = [line for line in done.err_lines if not line.startswith("loading")]
    assert errors[0].startswith("error: ")
    assert len(errors) <= 6
    assert not list(program.home.glob("out*"))
    assert not list(program.home.glob("state/minivllm/crash*"))
