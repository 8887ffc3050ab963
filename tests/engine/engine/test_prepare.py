"""What is refused before torch is loaded."""

import json
import logging
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm_engine.core.config import EngineConfig
from minivllm_engine.core.errors import (
    BackendUnavailable,
    CheckpointError,
    ConfigError,
    RequestError,
)
from minivllm_engine.engine.prepare import prepare
from minivllm_engine.memory.devices import DeviceMemory
from minivllm_engine.text.prompt import read_prompt


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def config(**engine: object) -> EngineConfig:
    return EngineConfig.create(engine={"max_num_seqs": 2, **engine})


def edit_config(model: Path, **changes: object) -> None:
    path = model / "config.json"
    content = json.loads(path.read_text())
    content.get("text_config", content).update(changes)
    path.write_text(json.dumps(content))


def test_everything_automatic_is_decided(model: Path) -> None:
    prepared = prepare(model, config())
    assert prepared.path == model
    assert None not in prepared.config.engine.model_dump().values()
    assert prepared.config.cache.num_blocks == prepared.plan.num_blocks


def test_tensors_that_are_left_out_are_counted(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(model, config())
    assert "left out" not in caplog.text
    file = next(model.glob("*.safetensors"))
    more = {"mtp.fc.weight": torch.zeros(2), "model.visual.x": torch.zeros(2)}
    save_file(load_file(file) | more, file)
    prepare(model, config())
    assert "2 tensors of parts that are not used (vision, MTP) are left out" in caplog.text


def test_cuda_is_refused_with_a_remedy(model: Path) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        prepare(model, config(device="cuda"))
    assert caught.value.hint == '--device cpu (in Python: engine={"device": "cpu"})'


def test_f1_what_does_not_fit_is_refused_before_torch_or_a_weight_is_loaded(model: Path) -> None:
    code = (
        "import sys\n"
        "from minivllm_engine.core.config import EngineConfig\n"
        "from minivllm_engine.core.errors import CapacityError\n"
        "from minivllm_engine.engine.prepare import prepare\n"
        "engine = {'max_num_seqs': 100_000, 'cpu_memory': '16MiB'}\n"
        "try:\n"
        "    prepare(sys.argv[1], EngineConfig.create(engine=engine))\n"
        "except CapacityError as error:\n"
        "    print(error.what, error.hint, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True)
    assert done.stdout.startswith("max_num_seqs 100000 needs 100000 state slots"), done.stderr
    assert "--set engine.max_num_seqs=" in done.stdout and done.stdout.endswith(" False\n")


def test_a_tokenizer_of_another_model_is_named(model: Path) -> None:
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["xyz"] = 999
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
        prepare(model, config())
    assert "999" in caught.value.why


def test_added_tokens_beyond_the_embedding_cost_only_the_prompts_that_use_them(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append({**content["added_tokens"][-1], "id": 320, "content": "<extra>"})
    path.write_text(json.dumps(content))
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(path))
    while backend.get_vocab_size() <= 320:
        backend.add_tokens([f"<more{backend.get_vocab_size()}>"])
    backend.save(str(path))
    with caplog.at_level(logging.WARNING, "minivllm_engine"):
        tokenizer = prepare(model, config()).tokenizer
    assert "<more320>" in caplog.text and "<more319>" not in caplog.text
    assert read_prompt("a<more319>", tokenizer)[0][-1] == 319
    for prompt in ("a<more320>", [320]):
        with pytest.raises(RequestError, match="320 is out of range") as caught:
            read_prompt(prompt, tokenizer)
        assert "<more320>" in caught.value.why


def test_an_end_id_beyond_the_vocabulary_is_ignored_with_a_warning(model: Path, caplog) -> None:
    edit_config(model, eos_token_id=99999)
    with caplog.at_level(logging.WARNING, "minivllm_engine"):
        prepared = prepare(model, config())
    assert "99999" in caplog.text
    assert 99999 not in prepared.end_ids


def test_a_shard_outside_the_directory_is_not_read(model: Path, tmp_path: Path) -> None:
    shutil.move(model / "model.safetensors", tmp_path / "elsewhere.safetensors")
    for name in ("../elsewhere.safetensors", str(tmp_path / "elsewhere.safetensors")):
        index = {"weight_map": {"model.norm.weight": name}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match="outside its directory"):
            prepare(model, config())


def test_bytes_after_the_last_tensor_are_refused(model: Path) -> None:
    with (model / "model.safetensors").open("ab") as file:
        file.write(b"abc")
    with pytest.raises(CheckpointError) as caught:
        prepare(model, config())
    assert "3 bytes follow" in caught.value.why


@pytest.mark.parametrize(("shift", "text"), [(4, "hole"), (-4, "overlaps")])
def test_holes_and_overlaps_are_refused(model: Path, shift: int, text: str) -> None:
    path = model / "model.safetensors"
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    last = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
    header[last]["data_offsets"] = [offset + shift for offset in header[last]["data_offsets"]]
    text_header = json.dumps(header).encode()
    data = raw[8 + length :] + b"\0" * 8
    path.write_bytes(struct.pack("<Q", len(text_header)) + text_header + data)
    with pytest.raises(CheckpointError) as caught:
        prepare(model, config())
    assert text in caught.value.why


def test_a_directory_without_config_says_what_is_there(model: Path) -> None:
    (model / "config.json").rename(model / "old.bin")
    with pytest.raises(CheckpointError) as caught:
        prepare(model, config())
    assert "1 *.bin" in caught.value.what
    assert caught.value.hint


def test_graphs_of_reference_operations_are_refused(monkeypatch) -> None:
    card = DeviceMemory("cuda", "GPU", 8 << 30)
    monkeypatch.setattr("minivllm_engine.engine.prepare.choose_device", lambda options: card)
    reference = {"engine": {"attention_backend": "reference"}}
    assert prepare("demo", EngineConfig.create(**reference)).plan.max_graph_batch == 0
    with pytest.raises(ConfigError) as caught:
        prepare("demo", EngineConfig.create(**reference, graph={"enabled": True}))
    assert "cannot be captured" in caught.value.what
    assert caught.value.hint == "--set graph.enabled=false"


def test_graphs_on_a_cpu_are_refused_and_not_ignored() -> None:
    asked = EngineConfig.create(engine={"device": "cpu"}, graph={"enabled": True})
    with pytest.raises(ConfigError, match=r"graph\.enabled true needs a GPU") as caught:
        prepare("demo", asked)
    assert caught.value.hint == "--set graph.enabled=false"
    prepare("demo", EngineConfig.create(engine={"device": "cpu"}, graph={"enabled": False}))
