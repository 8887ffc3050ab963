"""What is found out before anything is written, and what is said of what will be."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli.convert.conftest import Run
from support.tiny_checkpoint import random_tensors, tiny_config, write_checkpoint

IDS = torch.arange(20)
LOGITS = torch.zeros(3, 320)


def _text(path: Path) -> None:
    path.write_text("no safetensors")


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _torn(path: Path) -> None:
    save_file({"input_ids": IDS, "logits": LOGITS}, path)
    path.write_bytes(path.read_bytes()[:-8])


def _huge(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


def _with(**tensors: torch.Tensor):
    return lambda path: save_file(tensors, path)


WRONG = {
    "no file": (lambda path: None, "there is no such file"),
    "a directory": (lambda path: path.mkdir(), "there is no such file"),
    "a text": (_text, "is not a safetensors file"),
    "nothing": (_empty, "is truncated"),
    "torn": (_torn, "is truncated"),
    "an impossible header": (_huge, "is not a safetensors file"),
    "no logits": (_with(input_ids=IDS), "no input_ids and logits"),
    "floats for ids": (_with(input_ids=IDS.float(), logits=LOGITS), "not of the form needed"),
    "whole numbers for logits": (
        _with(input_ids=IDS, logits=LOGITS.int()),
        "not of the form needed",
    ),
    "ids in rows": (_with(input_ids=IDS[None], logits=LOGITS), "not of the form needed"),
    "logits in batches": (_with(input_ids=IDS, logits=LOGITS[None]), "not of the form needed"),
    "more logits than ids": (_with(input_ids=IDS[:2], logits=LOGITS), "not of the form needed"),
    "no logits at all": (_with(input_ids=IDS, logits=LOGITS[:0]), "not of the form needed"),
    "a scalar": (_with(input_ids=torch.tensor(3), logits=LOGITS), "not of the form needed"),
    "another vocabulary": (_with(input_ids=IDS, logits=torch.zeros(3, 321)), "does not belong"),
    "ids beyond": (_with(input_ids=IDS + 305, logits=LOGITS), "holds 5 ids outside the vocabulary"),
    "negative ids": (_with(input_ids=IDS - 2, logits=LOGITS), "holds 2 ids outside the vocabulary"),
    "infinite": (_with(input_ids=IDS, logits=LOGITS / 0), "holds 960 logits that are not finite"),
}


@pytest.mark.parametrize("case", WRONG)
def test_stored_logits_are_looked_at_before_anything_is_written(
    case: str, here: Run, src: Path, tmp_path: Path
) -> None:
    make, message = WRONG[case]
    make(tmp_path / "logits")
    done = here("src", "dst", "--verify-logits", "logits")
    assert (done.code, done.out) == (2, "")
    (error,) = [line for line in done.err_lines if line.startswith("error: ")]
    assert message in error and done.err_lines[-1].startswith("try: ")
    assert not list(tmp_path.glob("dst*"))


def test_an_overwritten_target_is_still_there_then(here: Run, src: Path, tmp_path: Path) -> None:
    assert here("src", "dst").code == 0
    before = (tmp_path / "dst/model.safetensors").read_bytes()
    save_file({"input_ids": IDS}, "logits")
    done = here("src", "dst", "--verify-logits", "logits", "--overwrite", "-y", "--dtype", "bf16")
    assert done.code == 2
    assert (tmp_path / "dst/model.safetensors").read_bytes() == before


def test_an_incomplete_target_cannot_be_run(here: Run, src: Path, tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    name = "model.layers.3.self_attn.k_norm.weight"
    del tensors[name]
    write_checkpoint(tmp_path / "less", tiny_config(), tensors)
    save_file({"input_ids": IDS, "logits": LOGITS}, "logits")
    done = here("less", "dst", "--allow-missing", name, "--verify-logits", "logits")
    assert (done.code, done.out) == (2, "") and "needs a whole model" in done.err
    assert not list(tmp_path.glob("dst*"))
    done = here("less", "dst", "--allow-missing", name)
    assert (done.code, done.out) == (0, "dst\n")
    assert (
        f"({name})" in done.err and "marked incomplete, and the engine will not load it" in done.err
    )
    done = here("less", "dst", "--check")
    assert done.code == 5 and f"INCOMPLETE  {name}" in done.out
    assert "error: dst is incomplete: --allow-missing has left out 1 tensor" in done.err_lines
    assert done.err_lines[-1].endswith("minivllm convert-weights SRC dst --overwrite")


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_sizes_count_a_head_that_may_be_its_own(
    dtype: str, here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    embedding = tensors["model.embed_tokens.weight"]
    copies = {"same": embedding.clone(), "other": embedding + 1}
    needs = {}
    for name, head in copies.items():
        write_checkpoint(tmp_path / name, config, {**tensors, "lm_head.weight": head})
        done = here(name, "dst", "--dry-run", "--json", "--dtype", dtype)
        assert done.code == 0
        needs[name] = done.records[0]
        assert "if the head is not the embedding)" in done.err
    assert needs["same"]["totals"] == needs["other"]["totals"]  # headers do not tell
    assert needs["other"]["totals"]["bytes_head"] == 320 * 64 * (4 if dtype == "keep" else 2)
    announced = needs["other"]["needs"]["disk"]
    without = write_checkpoint(tmp_path / "without", config, tensors)
    less = here(without, "dst", "--dry-run", "--json", "--dtype", dtype).records[0]
    assert "bytes_head" in less["totals"] and less["totals"]["bytes_head"] == 0
    for free, code in ((announced, 0), (announced - 1, 2)):
        with monkeypatch.context() as patch:
            patch.setattr("minivllm_engine.conversion.planning.free_space", lambda _, n=free: n)
            assert here("other", "dst", "--dry-run", "--dtype", dtype).code == code
    sizes = {}
    for name in copies:
        assert here(name, f"dst-{name}", "--dtype", dtype).code == 0
        files = (tmp_path / f"dst-{name}").iterdir()
        sizes[name] = sum(file.stat().st_size for file in files if file.suffix == ".safetensors")
    total = needs["other"]["totals"]
    assert sizes["other"] - sizes["same"] == pytest.approx(total["bytes_head"], abs=200)
    # As much as is written, and as much again for one file: never less than announced.
    assert 2 * sizes["other"] <= announced
    assert "lm_head.weight" in load_file(tmp_path / "dst-other/model.safetensors")


def test_the_converter_checks_the_same_space(
    here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the head that turned out to be kept: refused before a byte, and nothing is in the way."""
    config = tiny_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    head = tensors["model.embed_tokens.weight"] + 1
    write_checkpoint(tmp_path / "src", config, {**tensors, "lm_head.weight": head})
    size = sum(t.numel() * 4 for t in tensors.values()) + head.numel() * 4
    with monkeypatch.context() as patch:
        patch.setattr("minivllm_engine.conversion.converting.free_space", lambda _: 2 * size - 1)
        done = here("src", "dst")
    assert done.code == 2 and "are needed" in done.err
    assert not list(tmp_path.glob("dst*"))
    assert here("src", "dst").code == 0


def test_a_foreign_model_type_is_refused_by_name(here: Run, tmp_path: Path) -> None:
    config = tiny_config(model_type="llama")
    src = write_checkpoint(tmp_path / "src", config, random_tensors(config))
    done = here("src", "dst")
    assert done.code == 2 and "model_type 'llama' is another architecture" in done.err
    assert '"model_type": "qwen3_5_text"' in done.err_lines[-1]
    (src / "config.json").write_text(json.dumps({**config, "model_type": "qwen3_5_text"}))
    assert here("src", "dst").code == 0
