"""Text that a checkpoint holds, in everything that reaches a terminal: visible, on its line, not endless."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cli.convert.conftest import Run
from support.tiny_checkpoint import random_tensors, tiny_config

EVIL = "\x1b[2J\nerror: forged\r\u202e" + "n" * 3000
NORM = "model.norm.weight"
REFERENCE = random_tensors(tiny_config())


def write(path: Path, tensors: dict[str, torch.Tensor], **changes: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**tiny_config(), **changes}))
    save_file(tensors, path / "model.safetensors")
    return path


def written(name: str, *, value: torch.Tensor | None = None) -> Callable[[Path], Path]:
    """A checkpoint with one more tensor."""
    return lambda path: write(path, {**REFERENCE, name: torch.zeros(2) if value is None else value})


def with_config(**changes: object) -> Callable[[Path], Path]:
    return lambda path: write(path, REFERENCE, **changes)


def saved(content: object) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        path.mkdir()
        (path / "config.json").write_text(json.dumps(tiny_config()))
        torch.save(content, path / "model.pt")
        return path

    return make


def two_files(path: Path) -> Path:
    write(path, {**REFERENCE, EVIL: torch.zeros(1)})
    (path / "model.safetensors").rename(path / "a.safetensors")
    save_file({EVIL: torch.zeros(1)}, path / "b.safetensors")
    return path


def index(weight_map: Callable[[dict[str, str]], dict[str, str]]) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        write(path, REFERENCE)
        (path / "model.safetensors").rename(path / "a.safetensors")
        names = dict.fromkeys(REFERENCE, "a.safetensors")
        content = {"weight_map": weight_map(names)}
        (path / "model.safetensors.index.json").write_text(json.dumps(content))
        return path

    return make


def broken_header(path: Path) -> Path:
    write(path, REFERENCE)
    header = json.dumps({EVIL: {"dtype": EVIL, "shape": [1] * 5000}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return path


def two_sources(path: Path) -> Path:
    wrapped = ".".join(["module"] * 1000) + "." + NORM
    return write(path, {**REFERENCE, wrapped: torch.zeros(64)})


def without(name: str, other: str) -> Callable[[Path], Path]:
    tensors = {key: value for key, value in REFERENCE.items() if key != name}
    return lambda path: write(path, {**tensors, other: REFERENCE[name]})


NAN = torch.full((64,), torch.nan)
WRAPPED = ".".join(["module"] * 900 + [NORM])
SOURCES: dict[str, Callable[[Path], Path]] = {
    "unmatched": written(EVIL),
    "unmatched in a layer": written("model.layers.0." + EVIL),
    "unmatched in a layer too many": written("model.layers.99." + EVIL),
    "nearly a known name": without("model.norm.weight", "model.no\x1brm.weight"),
    "quantised": written(EVIL + ".qweight"),
    "experts": written("model.layers.0.mlp.experts." + EVIL),
    "two sources": two_sources,
    "two files": two_files,
    "an index of more": index(lambda names: {**names, EVIL: "a.safetensors"}),
    "an index of less": index(lambda names: dict(list(names.items())[1:])),
    "an index of files that are not there": index(lambda names: {**names, NORM: EVIL}),
    "an index of files outside": index(lambda names: {**names, NORM: "../" + EVIL}),
    "a broken header": broken_header,
    "model_type": with_config(model_type=EVIL),
    "an activation": with_config(hidden_act=EVIL),
    "layer types": with_config(layer_types=[EVIL] * 4),
    "a size": with_config(hidden_size=EVIL),
    "text_config": with_config(text_config=EVIL),
    "a quantisation": with_config(quantization_config={"quant_method": EVIL}),
    "an end id": with_config(eos_token_id=EVIL),
    "a dtype": with_config(dtype=EVIL),
    "rope": with_config(rope_parameters={"rope_type": EVIL}),
    "keys": saved({EVIL: {"x": 1}, EVIL + "2": 3}),
    "nested tensors": saved({"a": torch.zeros(2), EVIL: {"b": torch.zeros(2)}}),
    "tensors beside": saved({"model": REFERENCE, EVIL: torch.zeros(2)}),
    "sparse": saved({EVIL: torch.eye(2).to_sparse()}),
    "a type": saved({**REFERENCE, NORM: torch.zeros(64, dtype=torch.bool)}),
    "values": lambda path: write(
        path, {**{key: value for key, value in REFERENCE.items() if key != NORM}, WRAPPED: NAN}
    ),
}


def is_clean(text: str) -> None:
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert not any(line.startswith("error: forged") for line in text.splitlines())
    assert max(map(len, text.splitlines()), default=0) < 3000


@pytest.mark.parametrize("case", SOURCES)
def test_what_a_source_holds(case: str, here: Run, tmp_path: Path) -> None:
    src = SOURCES[case](tmp_path / "evil")
    for args in (["dst"], ["dst", "--dry-run"], ["dst", "--state-key", "x"], ["--explain", EVIL]):
        done = here(src, *args)
        is_clean(done.out + done.err)
        assert not list(tmp_path.glob("state/**/crash*")), done.err
        if args == ["dst"]:
            tolerated = case == "model_type"  # an unknown name over the keys of the family
            assert (done.code == 0) == tolerated, done.err
            assert tolerated or any(line.startswith("try: ") for line in done.err_lines), done.err


def test_what_a_target_and_a_mapping_hold(here: Run, tmp_path: Path) -> None:
    src = write(tmp_path / "src", REFERENCE)
    assert here(src, "dst").code == 0
    save_file({**REFERENCE, EVIL: torch.zeros(1)}, "dst/model.safetensors")
    done = here(src, "dst", "--check")
    assert done.code == 5 and "UNEXPECTED  \\x1b[2J\\nerror" in done.out
    is_clean(done.out + done.err)
    evil = EVIL[:500]
    for content in ({evil: None}, {evil: evil + "*"}, {"a.*": evil + ".*.*"}, {evil + "..": "a"}):
        Path("map.yaml").write_text(json.dumps(content))
        is_clean(here(src, "dst2", "--mapping", "map.yaml", "--overwrite", "-y").err)
    is_clean(here(src, "dst2", "--allow-unmatched", EVIL, "--overwrite", "-y").err)
    save_file({EVIL: torch.zeros(2), "logits": torch.zeros(2)}, "logits")
    is_clean(here(src, "dst3", "--verify-logits", "logits").err)


def test_a_name_that_cannot_be_typed_can_be_dropped_all_the_same(here: Run, tmp_path: Path) -> None:
    """By a glob with ? for what cannot be typed, or in YAML, where it can be written with escapes."""
    name = "model.\x1b[2Jevil\nname"
    src = write(tmp_path / "src", {**REFERENCE, name: torch.zeros(2)})
    glob = "model.?[[]2Jevil?name"
    assert here(src, "dst").err_lines[-1].endswith(f"--allow-unmatched '{glob}'")
    assert here(src, "dst0", "--allow-unmatched", glob).code == 0
    Path("map.yaml").write_text(f"{json.dumps(name)}: null\n")
    assert here(src, "dst", "--mapping", "map.yaml").code == 0
