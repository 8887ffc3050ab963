"""`convert-weights`: what each option does, what it prints, and with which code it ends."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli.convert.conftest import Run
from cli.program import parse_strictly
from support.tiny_checkpoint import (
    OFFICIAL,
    TEXT,
    nested,
    random_tensors,
    tiny_config,
    write_checkpoint,
)
from support.transformers_oracle import TransformersOracle

A_LOG, NORM = "model.layers.0.linear_attn.A_log", "model.layers.0.linear_attn.norm.weight"


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


def manifest_of(path: Path) -> dict[str, object]:
    return parse_strictly((path / "minivllm_manifest.json").read_text())


def write_changed(src: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A single-file checkpoint of `tensors`, with the config of the tiny model."""
    return write_checkpoint(src, nested(tiny_config()), tensors)


def test_the_path_of_dst_is_all_that_stdout_gets(here: Run, src: Path) -> None:
    done = here(src, "dst")
    assert (done.code, done.out) == (0, "dst\n")
    names = {file.name for file in Path("dst").iterdir()}
    assert {"config.json", "model.safetensors", "minivllm_manifest.json"} <= names
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    assert not Path("dst.partial").exists()
    expected = random_tensors(tiny_config(), prefix=TEXT)
    written = tensors_of(Path("dst"))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert "peak RAM" in done.err  # said before it starts


def test_a_dry_run_writes_nothing_and_shows_the_mapping(here: Run, src: Path) -> None:
    done = here(src, "dst", "--dry-run")
    assert done.code == 0
    assert not list(Path().glob("dst*"))
    rows = [line.split() for line in done.out.splitlines() if " → model." in line]
    a_log = next(row for row in rows if row[1].endswith("A_log"))
    assert a_log[:4] == [
        "3",
        "model.language_model.layers.*.linear_attn.A_log",
        "→",
        "model.layers.*.linear_attn.A_log",
    ]
    assert "tensors:" in done.out and "disk needed" in done.out and "free" in done.out


def test_a_dry_run_can_do_without_dst(here: Run, src: Path) -> None:
    done = here(src, "--dry-run")
    assert done.code == 0
    assert "disk needed" in done.out and "free" not in done.out


def test_a_dry_run_as_json_is_one_document_and_the_table_goes_to_stderr(
    here: Run, src: Path
) -> None:
    done = here(src, "dst", "--dry-run", "--json")
    assert done.code == 0
    (document,) = done.records
    assert document["kind"] == "convert-plan" and document["ok"] is True
    assert document["totals"]["used"] == len(random_tensors(tiny_config()))
    assert " → " in done.err


def test_k24_everything_that_is_wrong_is_in_one_report(here: Run, src: Path) -> None:
    tensors = random_tensors(tiny_config(), prefix=OFFICIAL)
    layer = OFFICIAL + "layers."
    renamed = tensors.pop(layer + "1.linear_attn.in_proj_b.weight")
    tensors[layer + "1.linear_attn.in_prj_b.weight"] = renamed
    del tensors[layer + "3.self_attn.k_norm.weight"]
    tensors[layer + "0.mlp.router.weight"] = torch.zeros(2, 2)
    tensors[OFFICIAL + "norm.weight"] = torch.zeros(63)
    bad = write_changed(src.with_name("bad"), tensors)
    rehearsed, converted = here(bad, "dst", "--dry-run"), here(bad, "dst")
    for done, report in ((rehearsed, rehearsed.out), (converted, converted.err)):
        assert done.code == 5
        lines = report.splitlines()
        (unmatched,) = [line for line in lines if line.startswith("UNMATCHED") and "prj_b" in line]
        assert "in_proj_b.weight (1 edit)" in unmatched.partition("nearest:")[2]
        assert any(line.startswith("MISSING") and "k_norm" in line for line in lines)
        assert any(line.startswith("UNMATCHED") and "router" in line for line in lines)
        assert any(line.startswith("WRONG SHAPE") and "[63]" in line for line in lines)
        assert "error: 2 unmatched, 2 missing, 1 of a wrong shape; nothing written" in done.err
        assert not list(Path().glob("dst*"))
    assert converted.out == ""


def test_very_many_problems_are_shown_in_full_by_a_dry_run_only(here: Run, src: Path) -> None:
    tensors = random_tensors(tiny_config(), prefix=OFFICIAL)
    tensors |= {f"extra{i}.weight": torch.zeros(1) for i in range(80)}
    bad = write_changed(src.with_name("bad"), tensors)
    done = here(bad, "dst")
    assert done.code == 5
    assert sum(line.startswith("UNMATCHED") for line in done.err_lines) == 50
    assert "... and 30 more: --dry-run shows all" in done.err_lines
    shown = here(bad, "dst", "--dry-run").out.splitlines()
    assert sum(line.startswith("UNMATCHED") for line in shown) == 80


def test_what_is_allowed_is_left_out_and_done_without(here: Run, src: Path) -> None:
    tensors = random_tensors(tiny_config(), prefix=OFFICIAL)
    tensors[OFFICIAL + "layers.0.mlp.router.weight"] = torch.zeros(2, 2)
    more = write_changed(src.with_name("more"), tensors)
    assert here(more, "dst").code == 5
    assert here(more, "dst", "--allow-unmatched", "*.router.*").code == 0
    del tensors[OFFICIAL + "layers.0.mlp.router.weight"]
    del tensors[OFFICIAL + "layers.3.self_attn.k_norm.weight"]
    less = write_changed(src.with_name("less"), tensors)
    assert here(less, "dst2").code == 5
    assert here(less, "dst2", "--allow-missing", "model.layers.3.*.k_norm.weight").code == 0
    assert "model.layers.3.self_attn.k_norm.weight" not in tensors_of(Path("dst2"))


def test_k25_a_cast_keeps_protected_parameters_bit_for_bit(here: Run, src: Path) -> None:
    shown = here(src, "dst", "--dtype", "bf16", "--dry-run").out.splitlines()
    assert all("fp32 kept" in line for line in shown if "A_log" in line or "attn.norm" in line)
    done = here(src, "dst", "--dtype", "bf16")
    assert done.code == 0
    expected, written = random_tensors(tiny_config(), prefix=TEXT), tensors_of(Path("dst"))
    for name in (A_LOG, NORM):
        assert torch.equal(written[name], expected[name])
    matrix = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(written[matrix], expected[matrix].bfloat16())
    (line,) = [line for line in done.err_lines if "is rounded" in line]
    error = float(line.partition("at most ")[2].partition(",")[0])
    assert 1e-3 < error <= 2**-8  # half a unit in the last of 8 bits, relative


def test_k25_a_cast_that_makes_a_value_infinite_fails_and_names_it(here: Run, src: Path) -> None:
    tensors = random_tensors(tiny_config(), prefix=OFFICIAL)
    tensors[OFFICIAL + "layers.2.mlp.up_proj.weight"][3, 5] = 1e6
    large = write_changed(src.with_name("large"), tensors)
    done = here(large, "dst", "--dtype", "fp16")
    assert done.code == 5
    assert "layers.2.mlp.up_proj.weight" in done.err
    assert done.out == "" and not Path("dst").exists()
    assert here(large, "dst", "--overwrite", "-y").code == 0


def test_dst_that_holds_something_is_refused_and_says_what_to_do(here: Run, src: Path) -> None:
    Path("dst").mkdir()
    Path("dst/notes.txt").write_text("mine")
    done = here(src, "dst")
    assert done.code == 2
    assert done.err_lines[-1] == "try: Give another directory, or empty this one yourself."
    assert "why: notes.txt" in done.err_lines
    assert Path("dst/notes.txt").read_text() == "mine"


def test_a_dry_run_says_whether_dst_could_be_written_to(here: Run, src: Path) -> None:
    Path("dst").mkdir()
    Path("dst/config.json").write_text("{}")
    done = here(src, "dst", "--dry-run")
    assert done.code == 2
    assert "dst is not empty" in done.err
    assert here(src, "dst", "--dry-run", "--overwrite").code == 0
    assert here(src, "src/inside", "--dry-run").code == 2
    assert [file.name for file in Path("dst").iterdir()] == ["config.json"]


def test_overwriting_is_refused_where_nobody_can_be_asked(here: Run, src: Path) -> None:
    assert here(src, "dst").code == 0
    before = manifest_of(Path("dst"))
    done = here(src, "dst", "--overwrite", "--dtype", "bf16")
    assert done.code == 2
    assert "try: --overwrite -y" in done.err_lines
    assert manifest_of(Path("dst")) == before
    assert here(src, "dst", "--overwrite", "-y", "--dtype", "bf16").code == 0
    assert manifest_of(Path("dst"))["dtype"] == "bf16"


@pytest.mark.parametrize("inside", ["src", "src/converted"])
def test_dst_in_the_source_is_refused(here: Run, src: Path, inside: str) -> None:
    before = sorted(src.rglob("*"))
    done = here(src, inside, "--overwrite", "-y")
    assert done.code == 2
    assert done.err.count("error:") == 1
    assert sorted(src.rglob("*")) == before


def test_a_second_run_with_resume_finds_nothing_to_do(here: Run, src: Path) -> None:
    assert here(src, "dst").code == 0
    before = {file.name: file.stat().st_mtime_ns for file in Path("dst").iterdir()}
    done = here(src, "dst", "--resume")
    assert (done.code, done.out) == (0, "dst\n")
    assert {file.name: file.stat().st_mtime_ns for file in Path("dst").iterdir()} == before


def test_the_report_as_json(here: Run, src: Path) -> None:
    done = here(src, "dst", "--json", "--max-shard-size", "100kB", "--verify", "full")
    assert done.code == 0
    (document,) = done.records
    assert document["kind"] == "convert-report" and document["dst"] == "dst"
    assert document["verified"] == "full"
    assert document["num_verified"] == document["num_tensors"] == len(tensors_of(Path("dst")))
    files = sorted(Path("dst").glob("model-*.safetensors"))
    assert [shard["name"] for shard in document["shards"]] == [file.name for file in files]
    assert len(files) > 3
    assert max(file.stat().st_size for file in files) < 110_000


@pytest.mark.parametrize("much", ["none", "sample"])
def test_how_much_is_verified_stands_in_the_manifest(here: Run, src: Path, much: str) -> None:
    assert here(src, "dst", "--verify", much).code == 0
    shards = manifest_of(Path("dst"))["shards"]
    assert isinstance(shards, list)
    assert {shard["verified"] for shard in shards} == {much}


def test_check_finds_a_changed_byte(here: Run, src: Path) -> None:
    assert here(src, "dst").code == 0
    done = here(src, "dst", "--check")
    assert done.code == 0
    assert done.out.endswith(": no difference\n")
    assert here(src, "dst", "--check", "--json").records[0]["ok"] is True
    file = Path("dst/model.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    done = here(src, "dst", "--check")
    assert done.code == 5
    assert done.out.startswith("HASH") and "model.safetensors" in done.out
    assert done.err_lines[-3].startswith("error: dst has ")
    assert done.err_lines[-2] == "why: 1 hash, 1 value, of 56 tensors in 1 file"
    differences = here(src, "dst", "--check", "--json").records[0]["differences"]
    assert {"hash", "value"} <= {difference["kind"] for difference in differences}


def test_explain_shows_the_way_of_a_tensor_from_both_ends(here: Run, src: Path) -> None:
    name = OFFICIAL + "layers.1.linear_attn.A_log"
    done = here(src, "--explain", name)
    assert done.code == 0
    assert done.out.startswith(f"{name} (source)\n")
    assert "model.layers.1.linear_attn.A_log" in done.out
    done = here(src, "--explain", "model.layers.1.linear_attn.A_log", "--json")
    (explanation,) = done.records[0]["explanations"]
    assert explanation["side"] == "target"
    assert any(name in step["text"] for step in explanation["steps"])
    done = here(src, "--explain", name + "g")
    assert (done.code, done.out) == (2, "")
    assert name in done.err


def test_a_mapping_file_teaches_names(here: Run, src: Path) -> None:
    tensors = random_tensors(tiny_config(), prefix=TEXT)
    for i in range(3):
        part = f"{TEXT}layers.{i}."
        tensors[part + "mixing.decay"] = tensors.pop(part + "linear_attn.A_log")
        tensors[part + "aux.weight"] = torch.zeros(3)
    own = write_changed(src.with_name("own"), tensors)
    assert here(own, "dst").code == 5
    Path("map.yaml").write_text(
        "layers.*.mixing.decay: layers.*.linear_attn.A_log\nlayers.*.aux.weight: null\n"
    )
    done = here(own, "dst", "--mapping", "map.yaml")
    assert done.code == 0, done.err
    expected = random_tensors(tiny_config(), prefix=TEXT)
    written = tensors_of(Path("dst"))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert here(own, "dst", "--check").code == 0  # the manifest has the mapping


def test_the_line_that_is_proposed_works_as_it_stands(here: Run, src: Path) -> None:
    expected = random_tensors(tiny_config(), prefix=TEXT)
    own = {name.replace("mlp.up_proj", "mlp.w3"): tensor for name, tensor in expected.items()}
    torch.save(own, "p.pt")
    Path("config.json").write_text(json.dumps(tiny_config()))
    done = here("p.pt", "dst")
    assert done.code == 5
    hint, line = done.err_lines[-1].split(" the line ")
    assert hint == "try: --mapping FILE with"
    Path("map.yaml").write_text(line)
    document = here("p.pt", "dst", "--dry-run", "--json").records[0]
    assert document["remedy"]["mapping"] == dict([line.split(": ")])
    assert here("p.pt", "dst", "--mapping", "map.yaml").code == 0
    written = tensors_of(Path("dst"))
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    again = here("p.pt", "--mapping", "map.yaml", "--dry-run", "--json")
    assert again.records[0]["remedy"] is None


def test_a_layout_that_shapes_cannot_tell_has_to_be_said(here: Run, src: Path) -> None:
    tensors = random_tensors(tiny_config(), prefix=TEXT)
    for i in range(3):
        part = f"{TEXT}layers.{i}.linear_attn."
        for fused, names in (("qkvz", ("qkv", "z")), ("ba", ("b", "a"))):
            parts = [tensors.pop(f"{part}in_proj_{name}.weight") for name in names]
            tensors[f"{part}in_proj_{fused}.weight"] = torch.cat(parts)
    fused_source = write_changed(src.with_name("fused"), tensors)
    done = here(fused_source, "dst")
    assert done.code == 5
    assert "AMBIGUOUS" in done.err and "--qkvz-layout" in done.err
    assert here(fused_source, "dst", "--qkvz-layout", "concat").code == 0
    expected, written = random_tensors(tiny_config(), prefix=TEXT), tensors_of(Path("dst"))
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert here(fused_source, "other", "--qkvz-layout", "interleaved").code == 0
    name = f"{TEXT}layers.0.linear_attn.in_proj_qkv.weight"
    assert not torch.equal(tensors_of(Path("other"))[name], expected[name])


def test_gates_in_halves_are_put_beside_their_heads(here: Run, src: Path) -> None:
    tensors = random_tensors(tiny_config(), prefix=TEXT)
    name = f"{TEXT}layers.3.self_attn.q_proj.weight"
    expected = tensors[name]
    heads = expected.view(4, 2, 32, 64)  # [heads, q and gate, head_dim, hidden_size]
    tensors[name] = heads.transpose(0, 1).reshape(expected.shape).contiguous()
    halves = write_changed(src.with_name("halves"), tensors)
    assert here(halves, "dst", "--q-gate-layout", "halves").code == 0
    assert torch.equal(tensors_of(Path("dst"))[name], expected)


def test_stored_logits_find_gates_that_lie_otherwise(here: Run, src: Path) -> None:
    ids = list(range(40, 60))
    logits = TransformersOracle(src).logits(ids)
    save_file({"input_ids": torch.tensor(ids), "logits": logits[-3:].contiguous()}, "logits")
    done = here(src, "dst", "--verify-logits", "logits")
    assert (done.code, done.out) == (0, "dst\n")
    assert "logits agree" in done.err and "at 0 of 3 positions" in done.err
    done = here(src, "wrong", "--verify-logits", "logits", "--q-gate-layout", "halves")
    assert (done.code, done.out) == (5, "")
    assert "error: the logits of wrong are not those in logits" in done.err
    assert "--q-gate-layout" in done.err_lines[-1]
    done = here(src, "dst", "--resume", "--verify-logits", "logits", "--json")
    assert done.code == 0
    found = done.records[0]["logits"]
    assert found["ok"] is True and found["max_difference"] < 2e-4
    save_file({"ids": torch.tensor(ids)}, "other")
    done = here(src, "dst", "--resume", "--verify-logits", "other")
    assert (done.code, done.out) == (2, "")
    assert "input_ids" in done.err


class TestTorchFiles:
    """Sources of `torch.save`."""

    @pytest.fixture
    def weights(self) -> dict[str, torch.Tensor]:
        return random_tensors(tiny_config(), prefix=TEXT)

    def test_a_training_checkpoint_needs_a_config_and_takes_the_weights_alone(
        self, here: Run, tmp_path: Path, weights: dict[str, torch.Tensor]
    ) -> None:
        state = {"module." + name: tensor for name, tensor in weights.items()}
        document = {"step": 3, "model_state_dict": state, "optimizer_state_dict": {"state": {}}}
        torch.save(document, "checkpoint-3.pt")
        done = here("checkpoint-3.pt", "dst")
        assert done.code == 2
        assert "--model-config" in done.err
        Path("config.yaml").write_text("{}")
        Path("model.json").write_text(json.dumps(tiny_config()))
        assert here("checkpoint-3.pt", "dst", "--model-config", "model.json").code == 0
        written = tensors_of(Path("dst"))
        assert all(torch.equal(written[name], weights[name]) for name in weights)

    def test_two_sets_of_weights_have_to_be_told_apart(
        self, here: Run, tmp_path: Path, weights: dict[str, torch.Tensor]
    ) -> None:
        averaged = {name: tensor + 1 for name, tensor in weights.items()}
        torch.save({"model": weights, "net": averaged, "ema": averaged}, "model.pt")
        Path("config.json").write_text(json.dumps(tiny_config()))
        done = here("model.pt", "dst")
        assert done.code == 2
        assert "--state-key" in done.err
        name = "model.norm.weight"
        for dst, flags, shift in (
            ("a", ["--state-key", "model"], 0),
            ("b", ["--state-key", "net"], 1),
        ):
            assert here("model.pt", dst, *flags).code == 0
            assert torch.equal(tensors_of(Path(dst))[name], weights[name] + shift)
        torch.save({"model": weights, "ema": averaged}, "both.pt")
        for dst, more, shift in (("c", [], 0), ("d", ["--ema"], 1)):
            assert here("both.pt", dst, *more).code == 0
            assert torch.equal(tensors_of(Path(dst))[name], weights[name] + shift)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["src"], "DST is missing"),
        (["src", "--check"], "DST is missing"),
        (["src", "dst", "--check", "--dry-run"], "--dry-run and --check exclude each other"),
        (["src", "dst", "--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
        (["src", "dst", "-y"], "-y answers the question of --overwrite"),
        (["src", "dst", "--ema", "--state-key", "x"], "--ema and --state-key exclude each other"),
        (["src", "dst", "--check", "--dtype", "bf16"], "--dtype does not go with --check"),
        (["src", "dst", "--dry-run", "--verify", "full"], "--verify does not go with --dry-run"),
        (["src", "dst", "--explain", "x", "--resume"], "--resume does not go with --explain"),
        (["src", "dst", "--check", "--verify-logits", "x"], "--verify-logits does not go with"),
        (["src", "dst", "--verify-logits", "none"], "--verify-logits none: there is no such file"),
        (["src", ""], "an empty path"),
        (["", "dst"], "an empty path"),
        (["src", "."], "DST . is the current directory"),
        (["src", "/"], "DST / is the root directory"),
        (
            ["src", "dst", "--explain", "x", "--verify", "none"],
            "--verify does not go with --explain",
        ),
        (["src", "dst", "--max-shard-size", "big"], "--max-shard-size big is no size"),
        (["src", "dst", "--max-shard-size", "0"], "--max-shard-size 0: "),
        (["src", "dst", "--mapping", "none.yaml"], "cannot read mapping none.yaml"),
        (["src", "dst", "--dtype", "fp8"], "--dtype: 'fp8' is not one of"),
        (["none", "dst"], "none"),
        (["src", "dst", "--model-config", "none.json"], "none.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_error_with_code_2(
    here: Run, src: Path, args: list[str], message: str
) -> None:
    done = here(*args)
    assert (done.code, done.out) == (2, "")
    errors = [line for line in done.err_lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert len(done.err_lines) <= 6
    assert not list(Path().glob("dst*")) and not list(Path().glob("state/**/crash*"))


def test_names_in_a_file_cannot_move_the_cursor(here: Run, src: Path) -> None:
    tensors = random_tensors(tiny_config(), prefix=TEXT)
    tensors["model.\x1b[2Jevil"] = torch.zeros(1)
    bad = src.with_name("bad")
    bad.mkdir()
    (bad / "config.json").write_text(json.dumps(tiny_config()))
    save_file(tensors, bad / "model.safetensors")
    for args in (["--dry-run"], [], ["--explain", "model.\x1b[2Jevil"]):
        done = here(bad, "dst", *args)
        assert "\x1b" not in done.out + done.err
