"""`inspect-cache plan`: the table, the document, exit codes, without weights and without torch."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli.in_process import InProcess
from cli.program import REAL, Finished, Program
from minivllm_cli.app import run
from minivllm_engine.checkpoint.index import CheckpointIndex, resolve_model
from minivllm_engine.core.config import EngineConfig
from minivllm_engine.engine.prepare import prepare
from support.qwen35_08b import CONFIG

GIB = 2**30
_PROBE = (
    "import sys\n"
    "from minivllm_cli.app import run\n"
    "code = run(sys.argv[1:])\n"
    "print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)), code, file=sys.stderr)\n"
)
# The shape of the 27B model: 48 of 64 layers are DeltaNet.
_27B = CONFIG["text_config"] | {
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "linear_num_value_heads": 48,
    "tie_word_embeddings": False,
}


@pytest.fixture
def real(tmp_path: Path) -> Program:
    """The real program beside directories `m` and `large`, which hold nothing but a config.json."""
    program = InProcess(tmp_path, list(REAL))
    for name, config in (("m", CONFIG), ("large", _27B)):
        (program.home / name).mkdir()
        (program.home / name / "config.json").write_text(json.dumps(config))
    return program


def inspect(program: Program, *args: str, **extra: str) -> Finished:
    return program.run("inspect-cache", *args, **extra)


def document(done: Finished) -> dict[str, Any]:
    (record,) = done.records
    return record


def rows_of(record: dict[str, Any]) -> dict[str, int]:
    return {row["name"]: row["bytes"] for row in record["devices"][0]["rows"]}


def test_a_plan_needs_no_weights_torch_or_gpu(real: Program) -> None:
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE, "inspect-cache", "m", "--memory", "80GiB"],
        capture_output=True,
        text=True,
        env=real.environ(),
        cwd=real.home,
    )
    assert probe.stderr == "[] 0\n"
    for text in ("18.63 MiB = recurrent fp32 18.00 MiB", "12.00 KiB in 6 of 24 layers, 75% less"):
        assert text in probe.stdout


def test_a_bf16_state_takes_half_a_slot(real: Program) -> None:
    done = inspect(real, "m", "--memory", "80GiB", "--set", "engine.state_dtype=bf16", "--json")
    record = document(done)
    assert record["pools"]["state"]["unit_bytes"] == 10_100_736
    assert record["limits"]["kv_tokens_per_slot"] == 10_100_736 // 12_288
    assert "a slot or snapshot: 9.63 MiB" in done.err


@pytest.mark.parametrize(
    "args",
    [["m"], ["m", "--memory", "24GiB"], ["demo"], ["m", "--memory", "4GiB", "--device", "cpu"]],
)
def test_f5_rows_add_up_to_the_device(real: Program, args: list[str]) -> None:
    done = inspect(real, *args, "--json", "-q")
    record = document(done)
    device = record["devices"][0]
    assert sum(rows_of(record).values()) == device["total"]
    assert device["unaccounted"] == 0
    pools = record["pools"]
    assert [pools[name]["sinks"] for name in ("kv", "state", "snapshots")] == [1, 1, 0]
    for name, row in (("kv", "KV blocks"), ("state", "state slots"), ("snapshots",) * 2):
        pool = pools[name]
        assert (pool["total"] + pool["sinks"]) * pool["unit_bytes"] == rows_of(record)[row]


def test_f7_every_pool_is_printed_as_it_was_asked_for(real: Program) -> None:
    sets = ["engine.max_num_seqs=7", "cache.num_blocks=100", "cache.snapshot_memory=200MiB"]
    args = [word for text in sets for word in ("--set", text)]
    done = inspect(real, "m", "--memory", "80GiB", *args)
    assert "(7 + 1 spare) × 18.63 MiB" in done.out
    assert "10 × 18.63 MiB" in done.out
    assert "(100 + 1 spare) × 768.00 KiB" in done.out
    assert "KV holds 6,400 tokens, 64 in a block" in done.out


def test_the_plan_is_the_one_that_the_engine_is_made_from(real: Program) -> None:
    record = document(inspect(real, "demo", "--device", "cpu", "--json", "-q"))
    plan = prepare("demo", EngineConfig()).plan
    pools = record["pools"]
    assert pools["kv"]["total"] == plan.num_blocks
    assert pools["state"]["total"] == plan.max_num_seqs
    assert pools["snapshots"]["total"] == plan.num_snapshots
    assert rows_of(record)["weights"] == plan.weight_bytes
    stored = CheckpointIndex.open(resolve_model("demo"))
    basis = {row["name"]: row["basis"] for row in record["devices"][0]["rows"]}
    assert stored.entries and basis["weights"] == "headers"
    assert record["model"]["hash"].startswith("sha256:")


def test_k14_k22_what_does_not_fit_is_printed_and_ends_with_exit_4(real: Program) -> None:
    args = ["m", "plan", "--memory", "8GiB"]
    done = inspect(real, *args, "--max-num-seqs", "500")
    assert done.code == 4
    assert "too much" in done.out and "(500 + 1 spare) × 18.63 MiB" in done.out
    assert done.err_lines[-3].startswith("error: max_num_seqs 500 needs 500 state slots")
    fitting = done.err.partition("try: --max-num-seqs ")[2].partition(",")[0].strip()
    assert done.err_lines[-3].endswith(f"; {fitting} fit")
    assert inspect(real, *args, "--max-num-seqs", fitting).code == 0
    record = document(inspect(real, *args, "--max-num-seqs", "500", "--json", "-q"))
    assert record["fits"] is False
    assert sum(rows_of(record).values()) == 8 * GIB
    assert record["advice"][0] == f"--max-num-seqs {fitting}"
    by_key = inspect(real, *args, "--set", "engine.max_num_seqs=500")
    assert f"try: --set engine.max_num_seqs={fitting}" in by_key.err
    (real.home / "c.yaml").write_text("engine:\n  max_num_seqs: 500\n")
    in_a_file = inspect(real, *args, "--config", "c.yaml")
    assert f"try: --set engine.max_num_seqs={fitting}" in in_a_file.err


@dataclass(frozen=True)
class Shown:
    code: int
    out: str
    err: str


Here = Callable[..., Shown]


@pytest.fixture
def here(
    real: Program, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Here:
    """`minivllm inspect-cache m ARGS` in this process, which takes a tenth of the time."""
    monkeypatch.chdir(real.home)

    def call(*args: str) -> Shown:
        capsys.readouterr()
        code = run(["inspect-cache", "m", *args])
        return Shown(code, *capsys.readouterr())

    return call


@pytest.mark.parametrize("solve", [None, "max_num_seqs", "max_model_len"])
@pytest.mark.parametrize(
    ("where", "sets"),
    [
        (["--memory", "12GiB"], []),
        (["--memory", "12GiB"], ["--max-num-seqs", "100"]),
        (["--device", "cpu", "--memory", "16GiB"], ["--max-model-len", "4096"]),
        (["--memory", "6GiB", "--set", "cache.num_blocks=700"], []),
        (["--memory", "6GiB", "--set", "engine.state_dtype=bf16"], []),
    ],
)
def test_the_limits_that_are_printed_hold_where_they_say(
    here: Here, where: list[str], sets: list[str], solve: str | None
) -> None:
    """Each printed value is fed back to the planner, with the length beside which it stands."""
    first = here(*where, *sets, *([] if solve is None else ["--solve", solve]))
    text = first.out if solve is None else first.err
    stated = re.search(
        r"^fits: max_num_seqs ≤ ([\d,]+) \(.*?\)(, max_model_len lowered as needed"
        r"| at max_model_len ([\d,]+))\n      more ends with exit code 4$",
        text,
        re.M,
    )
    assert stated is not None, text
    assert (stated[3] is None) == (solve is None and "--max-model-len" not in sets)
    at = [] if stated[3] is None else ["--max-model-len", stated[3].replace(",", "")]
    most = int(stated[1].replace(",", ""))
    within, beyond = (
        here(*where, *at, "--max-num-seqs", str(count), "-q") for count in (most, most + 1)
    )
    assert (within.code, beyond.code) == (0, 4)
    kept = re.search(r"^      ≤ ([\d,]+) with a KV block each, max_model_len ([\d,]+)", text, re.M)
    if kept is not None:
        count, length = (int(figure.replace(",", "")) for figure in kept.groups())
        found = [
            gives_way(here, [*where, "--max-model-len", str(length)], n) for n in (count, count + 1)
        ]
        assert found == [False, True]
    full = re.search(
        r"^at max_model_len ([\d,]+): ([\d,]+) full-length requests? at once$", text, re.M
    )
    assert full is not None
    length, requests = (figure.replace(",", "") for figure in full.groups())
    assert int(requests) * -(-int(length) // 64) <= tokens_held(text) // 64


def test_one_is_told_as_one(here: Here) -> None:
    sets = ["--max-model-len", "4096", "--set", "cache.num_blocks=64"]
    done = here("--device", "cpu", "--memory", "16GiB", *sets)
    assert "at max_model_len 4,096: 1 full-length request at once\n" in done.out


def gives_way(here: Here, args: list[str], count: int) -> bool:
    """With so many sequences, is something lowered, or has one of them no KV block?"""
    done = here(*args, "--max-num-seqs", str(count), "--json")
    assert done.code == 0
    return "lowered" in done.err or json.loads(done.out)["pools"]["kv"]["total"] < count


def tokens_held(text: str) -> int:
    found = re.search(r"^KV holds ([\d,]+) tokens", text, re.M)
    assert found is not None
    return int(found[1].replace(",", ""))


def test_between_the_two_limits_something_is_lowered(real: Program) -> None:
    args = ["m", "--memory", "12GiB"]
    limits = document(inspect(real, *args, "--json", "-q"))["limits"]
    low, high = limits["unlowered_max_num_seqs"], limits["largest_max_num_seqs"]
    assert low < high
    text = inspect(real, *args, "-q").out
    length = f"max_model_len {limits['max_model_len']:,}"
    assert f"      ≤ {low:,} with a KV block each, {length} and snapshots kept\n" in text
    for count, lowers in ((low, False), (low + 1, True)):
        done = inspect(real, *args, "--max-num-seqs", str(count))
        assert done.code == 0 and (" lowered from " in done.err) is lowers


@pytest.mark.parametrize("key", ["max_num_seqs", "max_model_len"])
@pytest.mark.parametrize("where", [["--memory", "24GiB"], ["--device", "cpu", "--memory", "16GiB"]])
def test_solve_prints_yaml_that_fits_while_one_more_does_not(
    real: Program, key: str, where: list[str]
) -> None:
    done = inspect(real, "m", *where, "--solve", key, "--set", f"engine.{key}=9")
    assert done.code == 0
    (real.home / "solved.yaml").write_text(done.out)
    record = document(inspect(real, "m", *where, "--config", "solved.yaml", "--json", "-q"))
    value = record["limits"][key]
    assert f"  {key}: {value}\n" in done.out
    assert done.out.startswith(f"# {key} is the ") and max(map(len, done.out.splitlines())) <= 80
    assert "lowered" not in done.err
    positions = CONFIG["text_config"]["max_position_embeddings"]
    if (key, value) == ("max_model_len", positions):
        return
    more = inspect(
        real, "m", *where, "--config", "solved.yaml", "--set", f"engine.{key}={value + 64}"
    )
    # Nothing is left but what the default of the snapshots gives way to.
    assert more.code == 4 or "cache.snapshot_memory lowered" in more.err


def test_the_matrix_says_which_pool_is_too_small(real: Program) -> None:
    record = document(inspect(real, "m", "--memory", "6GiB", "--json", "-q"))
    cells = {(c["max_num_seqs"], c["max_model_len"]): c for c in record["what_fits"]}
    assert {cell["verdict"] for cell in cells.values()} >= {"ok", "KV", "state"}
    (current,) = [place for place, cell in cells.items() if cell["is_current"]]
    limits = record["limits"]
    assert current == (limits["max_num_seqs"], limits["max_model_len"])
    for (count, length), cell in cells.items():
        sets = ["--max-num-seqs", str(count), "--max-model-len", str(length)]
        if count in (16, 256) and length in (4096, 131072):
            code = inspect(real, "m", "--memory", "6GiB", *sets, "-q").code
            assert code == (0 if cell["verdict"] == "ok" else 4)


@pytest.mark.parametrize("columns", ["80", "120"])
@pytest.mark.parametrize("model", ["m", "large", "demo"])
@pytest.mark.parametrize("memory", ["8GiB", "140GiB"])
def test_k40_the_table_is_at_most_80_columns_wide(
    real: Program, model: str, memory: str, columns: str
) -> None:
    done = inspect(real, model, "--memory", memory, COLUMNS=columns)
    assert done.code == (4 if (model, memory) == ("large", "8GiB") else 0)
    assert max(map(len, done.out.splitlines())) <= 80
    assert "\x1b" not in done.out and "…" not in done.out


def test_the_27b_shape_has_the_exchange_rate_of_its_config(real: Program) -> None:
    record = document(inspect(real, "large", "--memory", "140GiB", "--json", "-q"))
    assert record["limits"]["kv_tokens_per_slot"] == 2_349
    assert record["pools"]["kv"]["bytes_per_token"] == 64 * 1024


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        (["m", "large"], "two models: m and large", "minivllm inspect-cache [MODEL] [plan|run]"),
        (["plan", "run"], "two views: plan and run", "minivllm inspect-cache [MODEL] [plan|run]"),
        (["m", "--input", "x"], "--input goes with the view run", "minivllm inspect-cache run"),
        (["m", "--sort", "age"], "--sort goes with the views", "minivllm inspect-cache run"),
        (["m", "--show-text"], "--show-text goes with the views", "minivllm inspect-cache run"),
        (["run", "--solve", "max_num_seqs"], "--solve goes with the view plan", "minivllm"),
        (["run", "--memory", "8GiB"], "--memory goes with the view plan", "minivllm inspect-cache"),
        (["run", "m"], "run: there are no requests to run", "--input FILE"),
        (["nowhere.json"], "cannot read nowhere.json: no such file", "minivllm generate --input"),
        (["nowhere"], "nowhere does not exist", "Nothing is downloaded"),
        (["m", "--memory", "lots"], "--memory: 'lots' is not a size", "--memory 80GiB"),
        (["m", "--memory", "0GiB"], "--memory: a device without memory", "--memory 80GiB"),
        (["m", "--memory", "80"], "--memory 80: a size needs its unit", "--memory 80GiB"),
        (
            ["m", "--max-model-len", "300K"],
            "engine.max_model_len 307200 is beyond",
            "--max-model-len ",
        ),
        (
            ["m", "--solve", "seeds"],
            "--solve: 'seeds' is not one of",
            "minivllm inspect-cache --help",
        ),
    ],
)
def test_usage_errors_say_what_works(real: Program, args: list[str], error: str, hint: str) -> None:
    done = inspect(real, *args)
    assert (done.code, done.out) == (2, "")
    lines = [line for line in done.err_lines if line.startswith(("error:", "try:"))]
    assert lines[0].startswith(f"error: {error}")
    assert lines[1].startswith(f"try: {hint}")


def test_a_directory_that_is_called_as_a_view_needs_a_path(real: Program) -> None:
    (real.home / "m").rename(real.home / "plan")
    assert "./plan on" in inspect(real, "./plan", "--memory", "80GiB").out
    assert "demo on" in inspect(real, "plan", "--memory", "80GiB").out


def test_weights_that_do_not_belong_to_the_config_are_refused(
    real: Program, tiny_model: Path
) -> None:
    (real.home / "m" / "model.safetensors").write_bytes(
        (tiny_model / "model.safetensors").read_bytes()
    )
    done = inspect(real, "m")
    assert done.code == 2
    assert "are not those that its config.json asks for" in done.err


def test_a_prefix_that_is_longer_than_the_context_is_a_warning(real: Program) -> None:
    done = inspect(
        real, "m", "--memory", "80GiB", "--set", "cache.block_size=128", "--max-model-len", "96"
    )
    assert "warning: the prefix cache cannot hit" in done.err
    assert "shortest prefix that can hit: none" in done.out


def test_k21_help_is_quick_and_loads_nothing_heavy(real: Program) -> None:
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE, "inspect-cache", "--help"],
        capture_output=True,
        text=True,
        env=real.environ(),
        timeout=20,
    )
    assert probe.stderr == "[] 0\n"
    assert "--solve" in probe.stdout
