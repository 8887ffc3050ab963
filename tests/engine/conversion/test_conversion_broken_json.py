"""JSON of a checkpoint that is JSON and nothing else: one error with a remedy, never a crash."""

import json
from pathlib import Path

import pytest

from minivllm_engine.checkpoint.index import CheckpointIndex
from minivllm_engine.conversion import open_source, plan_conversion
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.model_config.config import ModelConfig
from support.tiny_checkpoint import random_tensors, tiny_config, write_checkpoint

CONFIG = tiny_config()
REFERENCE = random_tensors(CONFIG)
DEEP = b"[" * 50_000


def refuses(attempts) -> None:
    for attempt in attempts:
        with pytest.raises(CheckpointError) as caught:
            attempt()
        assert caught.value.hint


INDEXES = {
    "a list": b"[]",
    "a list inside": b'{"weight_map": []}',
    "no tensor": b'{"weight_map": {}}',
    "a number for a file": b'{"weight_map": {"a": 3}}',
    "a file without a name": b'{"weight_map": {"a": ""}}',
    "a name that none can have": b'{"weight_map": {"a": "\\u0000"}}',
    "deep": DEEP,
    "no text": b"\xff\xfe",
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index(case: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, REFERENCE, shards=2)
    (tmp_path / "model.safetensors.index.json").write_bytes(INDEXES[case])
    refuses([lambda: open_source(tmp_path), lambda: CheckpointIndex.open(tmp_path)])


@pytest.mark.parametrize("size", [float("nan"), float("inf"), "many", [1], None, True])
def test_a_total_size_that_is_none(size: object, tmp_path: Path) -> None:
    """It says nothing, and so does not contradict."""
    write_checkpoint(tmp_path, CONFIG, REFERENCE, shards=2)
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    file.write_text(json.dumps({**index, "metadata": {"total_size": size}}))
    if size is True:  # 1 byte
        refuses([lambda: open_source(tmp_path)])
    else:
        assert plan_conversion(open_source(tmp_path)).ok


CONFIGS = {
    "deep": DEEP,
    "a list": b"[]",
    "no text": b"\xff\xfe",
    "a list for the text": b'{"text_config": []}',
    "very many layers": json.dumps(
        {**CONFIG, "num_hidden_layers": 10**9, "layer_types": None}
    ).encode(),
    "a very large vocabulary": json.dumps({**CONFIG, "vocab_size": 10**30}).encode(),
    "a word for a number": json.dumps({**CONFIG, "rms_norm_eps": "small"}).encode(),
    "NaN": json.dumps({**CONFIG, "rms_norm_eps": float("nan")}).encode(),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config(case: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, REFERENCE)
    (tmp_path / "config.json").write_bytes(CONFIGS[case])
    refuses(
        [lambda: plan_conversion(open_source(tmp_path)), lambda: ModelConfig.from_dir(tmp_path)]
    )


FIELDS = {
    "a negative dimension": ([-1], [0, 0]),
    "half a dimension": ([1.5], [0, 6]),
    "true for a dimension": ([True], [0, 4]),
    "a word for a dimension": (["x"], [0, 4]),
    "an object for a shape": ({"a": 1}, [0, 4]),
    "a word for a shape": ("", [0, 4]),
    "floats for offsets": ([1], [0.0, 4.0]),
    "an end before its beginning": ([1], [4, 0]),
    "three offsets": ([1], [0, 4, 4]),
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_header(case: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, REFERENCE)
    shape, offsets = FIELDS[case]
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
    size = max(0, int(offsets[1]))
    content = len(header).to_bytes(8, "little") + header + bytes(size)
    (tmp_path / "model.safetensors").write_bytes(content)
    refuses([lambda: open_source(tmp_path), lambda: CheckpointIndex.open(tmp_path)])


def test_a_header_that_is_deep(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, REFERENCE)
    content = len(DEEP).to_bytes(8, "little") + DEEP
    (tmp_path / "model.safetensors").write_bytes(content)
    refuses([lambda: open_source(tmp_path), lambda: CheckpointIndex.open(tmp_path)])
