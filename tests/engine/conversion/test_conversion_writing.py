"""What a conversion writes, where, and what stops it."""

import contextlib
import errno
import hashlib
import io
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minivllm_engine import LLM, SamplingParams
from minivllm_engine.checkpoint.index import CheckpointIndex
from minivllm_engine.conversion import (
    ConvertOptions,
    Progress,
    check,
    convert,
    open_source,
    plan_conversion,
    planning,
    reader,
    writer,
)
from minivllm_engine.conversion import (
    verify as verification,
)
from minivllm_engine.core.errors import CheckpointError, ConversionError
from support import converted as layouts
from support.byte_tokenizer import write_byte_tokenizer
from support.converted import convert_to, engine_logits, files_of
from support.fla_model import FlaModel, fla_config
from support.largest_tensor import LargestTensor
from support.tiny_checkpoint import (
    OFFICIAL,
    nested,
    official_dtypes,
    random_tensors,
    tiny_config,
    write_checkpoint,
)

CONFIG = tiny_config()
REFERENCE = random_tensors(CONFIG)


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "src", CONFIG, REFERENCE)


def fails(code: str, src: Path, dst: Path, **kwargs) -> ConversionError:
    with pytest.raises(ConversionError) as caught:
        convert_to(src, dst, **kwargs)
    assert caught.value.code == code
    return caught.value


# -- what is written -----------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["official", "mlx", "fla", "interleaved", "mixer"])
def test_g7_converting_twice_changes_nothing(style: str, tmp_path: Path) -> None:
    """Norms above all: what was shifted once has names and shapes that are shifted no more."""
    options = {}
    if style == "fla":
        src = FlaModel(fla_config()).save(tmp_path / "src")
    else:
        tensors, config = REFERENCE, CONFIG
        if style == "official":
            tensors, config = random_tensors(CONFIG, prefix=OFFICIAL), nested(CONFIG)
        elif style == "mlx":
            tensors = layouts.mlx_export(REFERENCE, CONFIG)
        elif style == "mixer":
            tensors = layouts.run_time_names(REFERENCE, CONFIG)
        else:
            tensors = layouts.qkvz_interleaved(REFERENCE, CONFIG)
            options = {"qkvz_layout": "interleaved"}
        src = write_checkpoint(tmp_path / "src", config, official_dtypes(tensors))
    write_byte_tokenizer(src)
    (src / "LICENSE").write_text("terms")
    (src / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    convert_to(src, tmp_path / "once", max_shard_bytes=300_000, **options)
    again = convert_to(tmp_path / "once", tmp_path / "twice", max_shard_bytes=300_000)
    assert files_of(tmp_path / "once") == files_of(tmp_path / "twice")
    assert len(again.shards) > 1
    plan = plan_conversion(open_source(tmp_path / "once"))
    assert {row.op for row in plan.rows} == {"copy"}


def test_g7_a_layout_is_not_undone_twice(tmp_path: Path) -> None:
    """Shapes cannot tell that it was done: the manifest does."""
    src = write_checkpoint(tmp_path / "src", CONFIG, layouts.q_gate_halves(REFERENCE, CONFIG))
    convert_to(src, tmp_path / "once", q_gate_layout="halves")
    with pytest.raises(CheckpointError, match="per-head already"):
        convert_to(tmp_path / "once", tmp_path / "twice", q_gate_layout="halves")


@pytest.mark.parametrize("where", ["config", "generation_config"])
def test_g13_a_list_of_end_ids_survives(where: str, src: Path, tmp_path: Path) -> None:
    """generation_config.json is carried over as it is, and each id of a list ends an output."""
    write_byte_tokenizer(src)
    ends = [7, 300]
    if where == "config":
        (src / "config.json").write_text(json.dumps(tiny_config(eos_token_id=ends)))
    else:
        content = {"eos_token_id": ends, "temperature": 0.6, "top_k": 20}
        (src / "generation_config.json").write_text(json.dumps(content))
    convert_to(src, tmp_path / "dst")
    if where == "generation_config":
        name = "generation_config.json"
        assert (tmp_path / "dst" / name).read_bytes() == (src / name).read_bytes()
    with LLM(tmp_path / "dst") as llm:
        for token, reason, length in ((7, "stop", 1), (300, "stop", 1), (8, "length", 4)):
            params = SamplingParams(temperature=0, max_tokens=4, logit_bias={token: 100})
            output = llm.generate([layouts.IDS], params)[0].outputs[0]
            assert (output.finish_reason, len(output.token_ids)) == (reason, length), token


def test_side_files_are_carried_over_and_others_are_not(src: Path, tmp_path: Path) -> None:
    write_byte_tokenizer(src)
    for name in ("LICENSE.txt", "NOTICE", "merges.txt", "chat_template.jinja"):
        (src / name).write_text(f"content of {name}")
    (src / "train.log").write_text("no part of a model")
    assert not plan_conversion(open_source(src)).notes
    convert_to(src, tmp_path / "dst")
    assert sorted(files_of(tmp_path / "dst")) == [
        "LICENSE.txt",
        "NOTICE",
        "chat_template.jinja",
        "config.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    (tmp_path / "dst/NOTICE").write_text("changed")
    (difference,) = check(open_source(src), tmp_path / "dst").differences
    assert (difference.kind, difference.name) == ("side_file", "NOTICE")


def test_the_tokenizer_may_lie_beside_a_config_elsewhere(src: Path, tmp_path: Path) -> None:
    """A training checkpoint with --model-config: the model's own directory has the rest."""
    model = tmp_path / "model"
    model.mkdir()
    write_byte_tokenizer(model)
    (src / "config.json").rename(model / "config.json")
    opening = {"model_config": model / "config.json"}
    (note,) = open_source(src, **opening).notes
    assert "tokenizer.json" in note and str(model) in note
    convert_to(src, tmp_path / "dst", opening=opening)
    assert (tmp_path / "dst/tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    write_byte_tokenizer(src)
    assert open_source(src, **opening).notes == ()


def test_a_missing_tokenizer_is_one_note(src: Path, tmp_path: Path) -> None:
    (note,) = plan_conversion(open_source(src)).notes
    assert "no tokenizer.json" in note
    assert convert_to(src, tmp_path / "dst").notes == ()


def test_the_manifest_says_what_was_done(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG, prefix=OFFICIAL) | {"model.visual.x.weight": torch.zeros(2)}
    src = write_checkpoint(tmp_path / "src", nested(CONFIG), tensors, shards=2)
    source = open_source(src)
    plan = plan_conversion(source, ConvertOptions(max_shard_bytes=400_000))
    report = convert(plan, tmp_path / "dst", argv=("convert-weights", "src", "dst"), verify="full")
    manifest = json.loads((tmp_path / "dst/minivllm_manifest.json").read_text())
    assert manifest["kind"] == "manifest" and manifest["mapping"] == "qwen3_5@1"
    assert manifest["argv"] == ["convert-weights", "src", "dst"]
    assert manifest["dropped"] == [{"rule": "text-only", "tensors": 1}]
    counts = {"read": 56, "written": 56, "operations": {"rename": 55, "copy": 1, "drop": 1}}
    assert manifest["counts"] == counts
    for shard in manifest["shards"]:
        data = (tmp_path / "dst" / shard["name"]).read_bytes()
        assert shard["sha256"] == hashlib.sha256(data).hexdigest()
        assert (shard["bytes"], shard["verified"]) == (len(data), "full")
    for file in manifest["source"]:
        data = (src / file["name"]).read_bytes()
        assert file["sha256"] == hashlib.sha256(data).hexdigest()
    assert [shard.name for shard in report.shards] == [s["name"] for s in manifest["shards"]]
    index = json.loads((tmp_path / "dst/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in REFERENCE.values())
    CheckpointIndex.open(tmp_path / "dst")
    assert not list((tmp_path / "dst").glob(".*")) and not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_lossy_cast_reports_its_largest_relative_error(
    dtype: str, src: Path, tmp_path: Path
) -> None:
    report = convert_to(src, tmp_path / "dst", dtype=dtype)
    words = {"bf16": torch.bfloat16, "fp16": torch.float16}
    casts = {cast.pattern: cast for cast in report.casts}
    assert "model.layers.*.linear_attn.A_log" not in casts
    assert "model.layers.*.input_layernorm.weight" not in casts
    written = load_file(tmp_path / "dst/model.safetensors")
    for pattern in ("model.layers.*.mlp.up_proj.weight", "lm_head.weight"):
        errors = {}
        for name, exact in REFERENCE.items():
            if (
                name.replace("0", "*").replace("1", "*").replace("2", "*").replace("3", "*")
                == pattern
            ):
                stored = written[name]
                assert stored.dtype == words[dtype]
                assert torch.equal(stored, exact.to(words[dtype]))
                errors[name] = float(((stored.double() - exact) / exact).abs().max())
        worst = max(errors, key=lambda name: errors[name])
        assert casts[pattern].worst == worst
        assert casts[pattern].max_relative_error == pytest.approx(errors[worst], rel=1e-6)
        assert (casts[pattern].before, casts[pattern].after) == ("fp32", dtype)
    assert convert_to(src, tmp_path / "exact", dtype="fp32").casts == ()


def test_memory_is_one_tensor_at_a_time(src: Path, tmp_path: Path) -> None:
    """No operation makes a tensor larger than the largest of the model, casts and checks included."""
    plan = plan_conversion(open_source(src), ConvertOptions(dtype="bf16"))
    with LargestTensor() as largest:
        convert(plan, tmp_path / "dst", verify="full")
    assert largest.numel <= 4 * max(tensor.numel() for tensor in REFERENCE.values())


def test_progress_counts_up_to_the_total_of_each_phase(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    src = write_checkpoint(tmp_path / "src", config, tensors)
    calls: list[Progress] = []
    convert_to(src, tmp_path / "dst", max_shard_bytes=300_000, progress=calls.append)
    assert list(dict.fromkeys(call.phase for call in calls)) == [
        "compare",
        "write",
        "verify",
        "hash",
    ]
    for phase in ("compare", "write", "verify", "hash"):
        some = [call for call in calls if call.phase == phase]
        assert [c.done_bytes for c in some] == sorted(c.done_bytes for c in some)
        assert some[0].done_bytes == 0 and some[-1].done_bytes == some[-1].total_bytes > 0
    check(open_source(src), tmp_path / "dst", progress=calls.append)
    for phase in ("write", "verify", "check"):
        some = [call for call in calls if call.phase == phase]
        assert {call.num_shards for call in some} == {4}
        assert [call.shard for call in some] == sorted(call.shard for call in some)
        assert {call.shard for call in some} == {1, 2, 3, 4}


def test_threads_are_given_back(src: Path, tmp_path: Path) -> None:
    during: list[int] = []
    torch.set_num_threads(2)
    try:
        convert_to(src, tmp_path / "dst", progress=lambda _: during.append(torch.get_num_threads()))
        assert set(during) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


# -- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_not_finite_are_reported_by_name(value: float, tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in REFERENCE.items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4:6] = value
    tensors["model.norm.weight"][0] = value
    src = write_checkpoint(tmp_path / "src", CONFIG, tensors)
    error = fails("non_finite", src, tmp_path / "dst")
    assert "2 tensors" in error.what
    assert "model.layers.1.mlp.up_proj.weight (2 values)" in str(error.why)
    assert "model.norm.weight (1 values)" in str(error.why)
    assert not (tmp_path / "dst").exists()


def test_values_that_a_cast_makes_infinite(tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in REFERENCE.items()}
    tensors["lm_head.weight"][0, 0] = 70_000.0
    src = write_checkpoint(tmp_path / "src", CONFIG, tensors)
    error = fails("non_finite", src, tmp_path / "dst", dtype="fp16")
    assert error.why == (
        "lm_head.weight (1 value too large for fp16: up to 7e+04, it holds 6.55e+04)"
    )
    assert str(error.hint).startswith("--dtype keep, or --dtype bf16")
    convert_to(src, tmp_path / "bf16", dtype="bf16")


def test_casts_that_lose_something() -> None:
    lossy = {
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
    }
    for pair in lossy:
        assert reader.is_lossy(*pair)
    for before, after in ((torch.bfloat16, torch.float32), (torch.float16, torch.float32)):
        assert not reader.is_lossy(before, after)


# -- the destination -----------------------------------------------------------------------------


def test_a_destination_that_is_filled_is_left_alone(src: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    dst.mkdir()
    convert_to(src, dst)  # an empty directory is no obstacle
    before = files_of(dst)
    error = fails("destination", src, dst)
    assert error.what == f"{dst} is not empty"
    assert error.hint == "--resume, or --overwrite"
    other = write_checkpoint(tmp_path / "other", CONFIG, random_tensors(CONFIG, seed=1))
    assert "not the result of this conversion" in fails("destination", other, dst, resume=True).what
    assert files_of(dst) == before
    convert_to(other, dst, overwrite=True)
    assert files_of(dst) != before
    assert not (tmp_path / "dst.replaced").exists()


def test_overwriting_deletes_only_checkpoints(src: Path, tmp_path: Path) -> None:
    dst = tmp_path / "home"
    (dst / "thesis").mkdir(parents=True)
    (dst / "thesis/chapter.tex").write_text("years of work")
    (dst / "photo.jpg").write_bytes(b"x")
    error = fails("destination", src, dst, overwrite=True)
    assert error.why == "photo.jpg, thesis"
    assert (dst / "thesis/chapter.tex").exists()
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial/mine.txt").write_text("x")
    for how in ({"overwrite": True}, {"resume": True}):
        assert fails("destination", src, tmp_path / "new", **how).why == "mine.txt"
    assert (tmp_path / "new.partial/mine.txt").exists()


@pytest.mark.parametrize("place", ["same", "link", "inside", "around", "partial", "file"])
def test_source_and_destination_are_kept_apart(place: str, src: Path, tmp_path: Path) -> None:
    before = files_of(src)
    os.symlink(src, tmp_path / "link")
    if place == "partial":
        src = src.rename(tmp_path / "x.partial")
    dst = {
        "same": src,
        "link": tmp_path / "link",
        "inside": src / "deep/dst",
        "around": tmp_path,
        "partial": tmp_path / "x",
        "file": src / "model.safetensors",
    }[place]
    for how in ({}, {"overwrite": True}, {"resume": True}):
        fails("destination", src, dst, **how)
    assert files_of(src) == before


def test_a_single_file_may_have_its_target_beside_it(src: Path, tmp_path: Path) -> None:
    convert_to(src / "model.safetensors", src / "out")
    assert torch.equal(engine_logits(src / "out"), engine_logits(src))


def test_a_plan_with_problems_writes_nothing(tmp_path: Path) -> None:
    tensors = {**REFERENCE, "model.layers.0.mlp.up_projj.weight": torch.zeros(2)}
    del tensors["model.norm.weight"]
    src = write_checkpoint(tmp_path / "src", CONFIG, tensors)
    error = fails("not_covered", src, tmp_path / "dst")
    assert error.what == "1 unmatched, 1 missing; nothing written"
    # up_proj itself is there: nothing could be mapped to it.
    assert "says what model.layers.0.mlp.up_projj.weight is" in str(error.hint)
    assert "--allow" not in str(error.hint)  # something is missing, which that would lose
    assert "with the line" not in str(error.hint)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]


def test_two_conversions_to_one_place(src: Path, tmp_path: Path) -> None:
    def second(_: Progress) -> None:
        fails("destination", src, tmp_path / "dst", resume=True)

    convert_to(src, tmp_path / "dst", progress=second)


# -- interruptions -------------------------------------------------------------------------------


class Stopped(BaseException):
    """As KeyboardInterrupt, which pytest would take for its own."""


def stop_in_shard(number: int):
    def progress(step: Progress) -> None:
        if step.phase == "write" and step.shard == number:
            raise Stopped

    return progress


def test_an_interrupted_conversion_is_resumed(src: Path, tmp_path: Path) -> None:
    options = {"max_shard_bytes": 200_000, "dtype": "bf16"}
    whole = convert_to(src, tmp_path / "whole", **options)
    dst, partial = tmp_path / "dst", tmp_path / "dst.partial"
    with pytest.raises(Stopped):
        convert_to(src, dst, progress=stop_in_shard(3), **options)
    assert not dst.exists() and partial.is_dir()
    kept = (partial / whole.shards[0].name).stat().st_mtime_ns
    assert "is left from a conversion" in fails("destination", src, dst, **options).what
    report = convert_to(src, dst, resume=True, **options)
    assert [shard.resumed for shard in report.shards[:3]] == [True, True, False]
    assert (dst / whole.shards[0].name).stat().st_mtime_ns == kept
    assert report.casts == whole.casts
    assert files_of(dst) == files_of(tmp_path / "whole")
    again = convert_to(src, dst, resume=True, **options)
    assert all(shard.resumed for shard in again.shards) and again.casts == whole.casts


def test_resuming_rewrites_a_damaged_shard(src: Path, tmp_path: Path) -> None:
    options = {"max_shard_bytes": 200_000}
    whole = convert_to(src, tmp_path / "whole", **options)
    dst = tmp_path / "dst"
    with pytest.raises(Stopped):
        convert_to(src, dst, progress=stop_in_shard(3), **options)
    damaged = tmp_path / "dst.partial" / whole.shards[0].name
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    report = convert_to(src, dst, resume=True, **options)
    assert [shard.resumed for shard in report.shards[:2]] == [False, True]
    assert files_of(dst) == files_of(tmp_path / "whole")


def test_another_conversion_is_not_resumed(src: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    with pytest.raises(Stopped):
        convert_to(src, dst, progress=stop_in_shard(2), max_shard_bytes=200_000)
    error = fails("destination", src, dst, resume=True, max_shard_bytes=200_000, dtype="bf16")
    assert "belongs to another conversion" in error.what
    os.utime(src / "model.safetensors", ns=(1, 1))  # the source was written anew
    fails("destination", src, dst, resume=True, max_shard_bytes=200_000)
    convert_to(src, dst, overwrite=True, max_shard_bytes=200_000)


def test_a_disk_without_room_is_told_before_anything_is_written(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(tensor.numel() * 4 for tensor in REFERENCE.values())
    for free, fits in ((2 * size, True), (2 * size - 1, False)):
        monkeypatch.setattr("minivllm_engine.conversion.converting.free_space", lambda _, n=free: n)
        if fits:
            convert_to(src, tmp_path / "fits")
        else:
            error = fails("no_space", src, tmp_path / "dst")
            assert "MiB are needed" in error.what
            assert not list((tmp_path / "dst.partial").glob("*.safetensors"))


def test_a_disk_that_fills_up_keeps_finished_shards(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_shard_bytes": 200_000}
    whole = convert_to(src, tmp_path / "whole", **options)
    written = 0
    sync = os.fsync

    def full(descriptor: int) -> None:
        nonlocal written
        written += 1
        if written > 7:  # in the second shard: state, shard and state before it take two each
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    error = fails("write_failed", src, tmp_path / "dst", **options)
    monkeypatch.undo()
    assert "is full" in error.what and "--resume" in str(error.hint)
    assert not list((tmp_path / "dst.partial").glob("*.tmp"))
    report = convert_to(src, tmp_path / "dst", resume=True, **options)
    assert report.shards[0].resumed
    assert files_of(tmp_path / "dst") == files_of(tmp_path / "whole")
    assert whole.num_tensors == report.num_tensors


def test_a_source_that_changes_while_it_is_read(src: Path, tmp_path: Path) -> None:
    plan = plan_conversion(open_source(src))
    file = src / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-400])
    with pytest.raises(CheckpointError, match=r"has changed .*\nit ends inside"):
        convert(plan, tmp_path / "dst")


# -- verification --------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["none", "sample", "full"])
def test_what_verification_sees(
    verify: str, src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One value of the last of four equal tensors is wrong on the disk: only a full comparison sees it."""
    original = writer.write_shard

    def wrong(file, targets, tensors, advance):
        def changed():
            for target, tensor in zip(targets, tensors, strict=True):
                if target.name == "model.layers.3.mlp.up_proj.weight":
                    tensor = tensor.clone()
                    tensor[0, 0] += 1
                yield tensor

        targets = list(targets)
        return original(file, targets, changed(), advance)

    monkeypatch.setattr("minivllm_engine.conversion.writer.write_shard", wrong)
    if verify == "full":
        error = fails("verification", src, tmp_path / "dst", verify=verify)
        assert "model.layers.3.mlp.up_proj.weight: 1 values" in str(error.why)
        assert not (tmp_path / "dst").exists()
        monkeypatch.undo()
        convert_to(src, tmp_path / "dst", resume=True, verify="full")
        assert check(open_source(src), tmp_path / "dst").ok
    else:
        report = convert_to(src, tmp_path / "dst", verify=verify)
        assert report.num_verified == (0 if verify == "none" else 23)
        (difference,) = check(open_source(src), tmp_path / "dst").differences
        assert difference.kind == "value"
        assert difference.name == "model.layers.3.mlp.up_proj.weight"


@pytest.mark.parametrize("style", ["mlx", "fla", "interleaved", "halves", "bf16"])
def test_the_inverted_mapping_gives_the_source_back(style: str, tmp_path: Path) -> None:
    """And a single changed value in any tensor is found, under the name that it has in the source."""
    options: dict = {}
    if style == "fla":
        src = FlaModel(fla_config()).save(tmp_path / "src")
    else:
        layout, options = {
            "mlx": (layouts.mlx_export, {}),
            "interleaved": (layouts.qkvz_interleaved, {"qkvz_layout": "interleaved"}),
            "halves": (layouts.q_gate_halves, {"q_gate_layout": "halves"}),
            "bf16": (lambda tensors, _: tensors, {"dtype": "bf16"}),
        }[style]
        src = write_checkpoint(tmp_path / "src", CONFIG, layout(REFERENCE, CONFIG))
    convert_to(src, tmp_path / "dst", **options)
    source = open_source(src)
    report = check(source, tmp_path / "dst")
    assert report.ok and report.num_tensors == len(load_file(tmp_path / "dst/model.safetensors"))
    tensors = load_file(src / "model.safetensors")
    for name in sorted(tensors)[:: len(tensors) // 8]:
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        changed[name].view(-1)[-1] += 0.25
        other = write_checkpoint(
            tmp_path / "other", json.loads((src / "config.json").read_text()), changed
        )
        differences = check(open_source(other), tmp_path / "dst").differences
        assert [(d.kind, d.name) for d in differences] == [("value", name)]


def test_check_finds_everything_else_that_is_wrong(src: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    convert_to(src, dst, max_shard_bytes=300_000)
    source = open_source(src)

    def kinds() -> set[tuple[str, str]]:
        return {(d.kind, d.name) for d in check(source, dst).differences}

    assert kinds() == set()
    first = dst / "model-00001-of-00004.safetensors"
    assert first.is_file()
    data = first.read_bytes()
    first.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    found = kinds()
    assert ("hash", first.name) in found and {kind for kind, _ in found} == {"hash", "value"}
    tail = load_file(first)
    first.write_bytes(data)
    first.rename(tmp_path / "away")
    assert {("missing", first.name), *(("missing", name) for name in tail)} <= kinds()
    (tmp_path / "away").rename(first)
    (dst / "other.safetensors").write_bytes(data)
    assert kinds() == {("unexpected", "other.safetensors")}
    (dst / "other.safetensors").unlink()
    config = json.loads((dst / "config.json").read_text())
    config["text_config"]["rms_norm_eps"] = 1e-5
    (dst / "config.json").write_text(json.dumps(config))
    (difference,) = check(source, dst).differences
    assert (difference.kind, difference.detail) == ("config", "differs in rms_norm_eps")
    (dst / "model.safetensors.index.json").unlink()
    assert ("missing", "model.safetensors.index.json") in kinds()
    (dst / "minivllm_manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no minivllm_manifest\.json"):
        check(source, dst)


def test_parts_of_a_plain_range_are_compared_one_by_one(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part boundary falls inside every matrix: nothing is left out there."""
    monkeypatch.setattr(verification, "_CHUNK_BYTES", 4000)
    monkeypatch.setattr(reader, "_CHUNK", 1000)
    convert_to(src, tmp_path / "dst", dtype="bf16")
    for row in (0, 15, 16, 319):
        tensors = {name: tensor.clone() for name, tensor in REFERENCE.items()}
        tensors["lm_head.weight"][row, -1] += 0.5
        other = write_checkpoint(tmp_path / "other", CONFIG, tensors)
        (difference,) = check(open_source(other), tmp_path / "dst").differences
        assert difference.name == "lm_head.weight" and "1 values" in difference.detail


def test_free_space_of_a_path_that_is_not_there_yet(tmp_path: Path) -> None:
    free = planning.free_space(tmp_path / "a/b/c")
    assert free == pytest.approx(planning.free_space(tmp_path), rel=0.05) and free > 0


# -- places that are none ------------------------------------------------------------------------


def test_further_chat_templates_are_carried_over(src: Path, tmp_path: Path) -> None:
    folder = src / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("{{ tools }}")
    (folder / "notes.txt").write_text("no template")
    dst = tmp_path / "dst"
    convert_to(src, dst)
    assert [file.name for file in (dst / folder.name).iterdir()] == ["tool_use.jinja"]
    assert check(open_source(src), dst).ok
    convert_to(src, dst, overwrite=True, dtype="bf16")
    (dst / folder.name / "tool_use.jinja").write_text("changed")
    (difference,) = check(open_source(src), dst).differences
    assert difference.name == "additional_chat_templates/tool_use.jinja"
    dst.rename(tmp_path / "dst.partial")  # as a run that was stopped leaves it
    convert_to(src, dst, resume=False, overwrite=True)
    assert check(open_source(src), dst).ok
    (dst / folder.name / "mine.txt").write_text("x")
    assert "additional_chat_templates" in str(fails("destination", src, dst, overwrite=True).why)


def test_what_comes_to_dst_meanwhile_is_not_replaced(src: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"

    def another(progress: Progress) -> None:
        if progress.phase == "verify" and not dst.exists():
            convert_to(src, tmp_path / "other", dtype="bf16")
            (tmp_path / "other").rename(dst)

    with pytest.raises(ConversionError, match="not empty any more") as caught:
        convert_to(src, dst, progress=another)
    assert caught.value.code == "destination"
    assert json.loads((dst / "minivllm_manifest.json").read_text())["dtype"] == "bf16"
    dst.rename(tmp_path / "moved")
    convert_to(src, dst, resume=True)
    assert check(open_source(src), dst).ok


def test_an_empty_partial_does_not_give_a_target_away(src: Path, tmp_path: Path) -> None:
    convert_to(src, tmp_path / "dst")
    (tmp_path / "dst.partial").mkdir()
    with pytest.raises(ConversionError, match="is not empty"):
        convert_to(src, tmp_path / "dst", dtype="bf16")
    assert check(open_source(src), tmp_path / "dst").ok


def test_names_that_cannot_be_had(src: Path, tmp_path: Path) -> None:
    """Found out before anything is read or written, whichever of the three names it is."""
    (tmp_path / "afile").write_text("x")
    (tmp_path / "a.partial").write_text("x")
    (tmp_path / "b.replaced").write_text("x")
    os.symlink("circle", tmp_path / "ring")
    os.symlink("ring", tmp_path / "circle")
    places = {
        "n" * 255: "File name too long",  # fits, but not with .partial behind it
        "n" * 300: "File name too long",
        "afile/dst": "Not a directory",
        "a": "a.partial is a file",
        "b": "b.replaced is a file",
        "ring": "a link in a circle",
    }
    before = sorted(path.name for path in tmp_path.iterdir())
    for name, why in places.items():
        for how in ({}, {"resume": True}, {"overwrite": True}):
            error = fails("destination", src, tmp_path / name, **how)
            assert why in str(error) and error.hint, name
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_link_to_what_is_not_there_yet_is_followed(src: Path, tmp_path: Path) -> None:
    os.symlink("real", tmp_path / "link")
    convert_to(src, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real/config.json").is_file()


def test_a_path_that_is_no_utf8(src: Path, tmp_path: Path) -> None:
    dst = tmp_path / os.fsdecode(b"d\xff st")
    source = open_source(src)
    convert(plan_conversion(source, dst=dst), dst, argv=(str(dst),))
    assert json.loads((dst / "minivllm_manifest.json").read_text())["argv"] == [str(dst)]
    assert check(source, dst).ok


@pytest.fixture
def without_rights(monkeypatch: pytest.MonkeyPatch):
    """Refuses to open, list or write what is named, as the system would an ordinary user."""
    refused: set[Path] = set()
    opened, listed, allowed = io.open, os.listdir, os.access

    def is_refused(path) -> bool:
        return isinstance(path, str | os.PathLike) and Path(path) in refused

    def deny(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))

    def fake(original):
        return lambda path, *a, **k: deny(path) if is_refused(path) else original(path, *a, **k)

    monkeypatch.setattr(io, "open", fake(opened))
    monkeypatch.setattr(io, "FileIO", fake(io.FileIO))
    monkeypatch.setattr(os, "listdir", fake(listed))
    monkeypatch.setattr(
        os, "access", lambda path, *a, **k: not is_refused(path) and allowed(path, *a, **k)
    )
    return refused


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "minivllm_manifest.json", "."]
)
@pytest.mark.parametrize("side", ["source", "target"])
def test_files_that_may_not_be_read(
    side: str, name: str, src: Path, tmp_path: Path, without_rights: set[Path]
) -> None:
    write_byte_tokenizer(src)
    dst = tmp_path / "dst"
    convert_to(src, dst)
    place = {"source": src, "target": dst}[side] / name
    without_rights.add(place)
    attempts = {
        "source": [lambda: open_source(src)],
        "target": [
            lambda: check(open_source(src), dst),
            lambda: convert_to(src, dst),
            lambda: convert_to(src, dst, resume=True),
            lambda: convert_to(src, dst, overwrite=True),
        ],
    }[side]
    for attempt in attempts:
        # What is not needed for it may be out of reach.
        with contextlib.suppress(CheckpointError, ConversionError):
            attempt()
    without_rights.clear()
    convert_to(src, dst, overwrite=True)
    assert check(open_source(src), dst).ok


def test_a_place_where_nothing_may_be_written(
    src: Path, tmp_path: Path, without_rights: set[Path]
) -> None:
    (tmp_path / "ro").mkdir()
    without_rights.add(tmp_path / "ro")
    for dst in (tmp_path / "ro/dst", tmp_path / "ro/a/b"):
        error = fails("destination", src, dst)
        assert "cannot be made" in error.what and str(tmp_path / "ro") in str(error.why)
