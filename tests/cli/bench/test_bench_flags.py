"""Which options of `bench` go together, its config section, and what does not fit."""

import subprocess
from pathlib import Path

import pytest

from cli.bench.conftest import Bench
from cli.bench.fake_bench_engine import Behaviour, FakeMachine
from cli.program import REAL
from minivllm_cli.bench import fitting
from minivllm_cli.config.bench_options import (
    Length,
    as_length,
    read_counts,
    read_lengths,
    read_percentiles,
)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("1,8,64", (1, 8, 64)), (8, (8,)), ([1, "8k", "2,3"], (1, 8000, 2, 3)), ("4,4", (4,))],
)
def test_lists(text: object, numbers: tuple[int, ...]) -> None:
    assert read_counts(text) == numbers


@pytest.mark.parametrize("text", ["", "a", "1-8", "-1", -1, True, 1.5, [1] * 65, []])
def test_lists_that_are_none(text: object) -> None:
    with pytest.raises(ValueError):
        read_counts(text)


def test_lengths_and_percentiles() -> None:
    assert read_lengths("8,100~1024") == (8, "100~1024")
    assert as_length("100~1K") == Length(100, 1024)
    assert as_length(8) == Length(8, 8)
    assert read_percentiles("99.9,50") == (50.0, 99.9)
    assert as_length("5~5") == Length(5, 5)
    assert read_lengths("5~5,5,6, 1~1k,1~1000") == (5, 6, "1~1000")
    for wrong in ("9~8", "~", "1~", "0~4", "0~0", "5~5~5"):
        with pytest.raises(ValueError):
            read_lengths(wrong)
    for wrong in ("101", "-1", "x", True):
        with pytest.raises(ValueError):
            read_percentiles(wrong)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--graph"],
            "error: --graph needs CUDA; this run uses cpu\ntry: drop --graph, or --device",
        ),
        (
            ["--suite", "quick", "--workload", "decode"],
            "error: bench.suite and bench.workload exclude each other (--suite and --w",
        ),
        (["--batch", "4"], "error: --batch: the suite standard has its own workloads"),
        (["--workload", "prefil"], "error: --workload prefil: bench.workload: should be one of"),
        (["--workload", "decode", "--prompt-len", "4"], "error: bench.prompt_len is nothing that"),
        (["--workload", "prefill", "--gen-len", "4"], "error: bench.gen_len is nothing that"),
        (["--workload", "decode", "--gen-len", "2~4"], "error: bench.gen_len 2~4: "),
        (["--workload", "decode", "--batch", "8-1"], "error: --batch 8-1: bench.batch: '8-1' is"),
        (["--workload", "prefix", "--depth", "0"], "error: bench.depth 0: "),
        (["--workload", "jsonl:nowhere"], "error: cannot read input nowhere: No such file"),
        (["--json", "--format", "csv"], "error: --json and --format csv exclude each other"),
        (["--verify", "0"], "error: --verify 0: should be at least 1"),
        (["--fail-if-slower", "3%"], "error: --fail-if-slower goes with --compare"),
        (["--metric", "tok_s"], "error: --metric goes with --compare"),
        (["--shape", "0.8b"], "error: MODEL and --shape exclude each other"),
        (["--compare", "a", "b"], "error: MODEL measures, and --compare only reads"),
        (["--reps", "0"], "error: --reps 0: bench.reps: "),
        (["--overwrite"], "error: --overwrite goes with --save"),
        (["--save", "/"], "error: cannot write /"),
        (
            ["--workload", "decode", "--max-num-seqs", "2"],
            "why: max_num_seqs is 2\ntry: --batch 1,2",
        ),
        (["--workload", "decode", "--depth", "8k"], "why: max_model_len is 4,096; the model's"),
        (["--suite", "quick", "--max-model-len", "8"], "error: nothing of this suite fits"),
    ],
)
def test_usage_errors(machine: FakeMachine, bench: Bench, args: list[str], message: str) -> None:
    machine.behaviour = Behaviour(device="cpu")
    done = bench(*args)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert not machine.engines, "found only after the weights were loaded"


@pytest.mark.parametrize("value", ["", " ", "null"])
@pytest.mark.parametrize(
    "flag",
    [
        *("--batch", "--prompt-len", "--gen-len", "--depth", "--percentiles", "--num-prompts"),
        *("--groups", "--reps", "--warmup", "--max-num-seqs", "--max-model-len"),
    ],
)
def test_a_flag_without_a_value_is_an_error(
    machine: FakeMachine, bench: Bench, flag: str, value: str
) -> None:
    done = bench("--workload", "prefix", flag, value)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: {flag} {value!r}: no value\ntry: leave {flag} out\n"


@pytest.mark.parametrize("text", ["1,,8", ",", "1,"])
def test_a_list_with_a_hole_is_an_error(machine: FakeMachine, bench: Bench, text: str) -> None:
    for flag in ("--batch", "--prompt-len", "--gen-len", "--depth", "--percentiles"):
        done = bench("--workload", "prefix", flag, text)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"error: {flag} {text}: bench.")


def test_an_empty_flag_of_a_comparison_is_not_ignored(machine: FakeMachine, bench: Bench) -> None:
    done = bench("--suite", "quick", "--fail-if-slower", "")
    assert "--fail-if-slower goes with --compare" in done.err
    assert bench("--suite", "quick", "--metric", "").code == 2


SMALL = ("--set", "engine.cpu_memory=8MiB", "--reps", 1, "--warmup", 0, "--eager", "-q")
HUGE = 10**9


@pytest.mark.parametrize(
    "args",
    [
        ("--workload", "decode", "--batch", HUGE),
        ("--workload", "decode", "--batch", f"1,2,{HUGE}", "--gen-len", "2,3"),
        ("--workload", "decode", "--batch", 10**30, "--depth", 200),
        ("--workload", "decode", "--set", f"bench.batch=[1,{HUGE}]"),
        ("--workload", "prefill", "--batch", HUGE, "--prompt-len", 3),
        ("--workload", "mixed", "--batch", HUGE, "--prompt-len", "2~5", "--gen-len", "1~3"),
        ("--workload", "prefix", "--batch", HUGE, "--depth", 64),
        ("--workload", "prefix", "--batch", HUGE, "--depth", 64, "--groups", HUGE),
        ("--workload", "prefix", "--batch", 2, "--depth", 64, "--groups", 9),
        ("--workload", "prefill", "--batch", 1, "--prompt-len", f"4,{HUGE}"),
        ("--workload", "prefill", "--batch", 1, "--prompt-len", f"4~{HUGE}"),
        ("--workload", "prefill", "--batch", 2, "--prompt-len", 9, "--num-prompts", HUGE),
        ("--workload", "decode", "--batch", 1, "--depth", HUGE),
        ("--workload", "decode", "--batch", 1, "--depth", HUGE, "--gen-len", HUGE),
        ("--workload", "decode", "--batch", HUGE, "--depth", HUGE, "--gen-len", HUGE),
        ("--shape", "0.8b", "--workload", "decode", "--batch", 1, "--depth", HUGE),
        ("--shape", "0.8b", "--workload", "decode", "--batch", HUGE, "--gen-len", 2),
    ],
    ids=lambda args: " ".join(map(str, args[1:])),
)
def test_rows_that_are_far_too_large_come_with_advice_that_works_as_it_is_written(
    machine: FakeMachine, bench: Bench, args: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "_MOST_REQUESTS", 500)
    machine.behaviour = Behaviour(device="cpu")
    is_shape = "--shape" in args
    small = SMALL[2:] if is_shape else SMALL
    model = None if is_shape else "demo"
    done = bench(*args, *small, model=model)
    assert done.code in (2, 4) and done.out == ""
    assert not machine.engines
    lines = done.err.splitlines()
    assert "max_model_len" not in lines[0], "nobody set that"
    if not lines[-1].startswith("try: "):  # no single option is enough
        assert sum(word == HUGE or word == int(HUGE) for word in args) > 1, done.err
        return
    words = lines[-1].removeprefix("try: ").split()
    if "--set" in words:  # which takes the place of the one that was typed
        args = args[:2]
    again = bench(*args, *small, *words, model=model)
    assert again.code == 0, (words, again.err)
    assert machine.engines


@pytest.mark.parametrize(
    ("keys", "common"),
    [
        (["batch"], ("--depth", 100, "--gen-len", 4)),
        (["gen-len"], ("--batch", 2, "--depth", 100)),
        (["depth"], ("--batch", 2, "--gen-len", 4)),
    ],
)
def test_no_value_that_is_proposed_could_be_larger(
    machine: FakeMachine, bench: Bench, keys: list[str], common: tuple[object, ...]
) -> None:
    machine.behaviour = Behaviour(device="cpu")
    args = ("--workload", "decode", *common, "--set", "engine.cpu_memory=32MiB", *SMALL[2:])
    huge = [word for key in keys for word in (f"--{key}", HUGE)]
    words = bench(*args, *huge).err.splitlines()[-1].removeprefix("try: ").split()
    found = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    assert sorted(found) == sorted(f"--{key}" for key in keys)
    assert bench(*args, *words).code == 0
    for flag, value in found.items():
        assert bench(*args, *words, flag, value + 1).code in (2, 4), flag


def test_what_was_set_too_large_for_any_row_is_told_as_it_is(
    machine: FakeMachine, bench: Bench
) -> None:
    done = bench("--workload", "decode", "--set", "cache.num_blocks=1000000000")
    assert done.code == 4
    assert done.err.startswith("error: cache.num_blocks 1000000000 needs ")


def test_a_decode_batch_beyond_the_kv_blocks_does_not_fit(
    machine: FakeMachine, bench: Bench
) -> None:
    args = ("--workload", "decode", "--depth", 1000, "--set", "cache.num_blocks=60", "--eager")
    done = bench(*args, "--batch", 4)
    assert done.code == 4
    assert done.err.splitlines()[-1].startswith("try: --batch 3")
    assert bench(*args, "--batch", 3, "--reps", 1, "--warmup", 0).code == 0


def test_the_proposed_length_fits(machine: FakeMachine, bench: Bench) -> None:
    args = ("--workload", "decode", "--batch", 1, "--reps", 1, "--warmup", 0)
    done = bench(*args, "--depth", 4090)
    hint = done.err.splitlines()[-1]
    assert hint.startswith("try: --depth ")
    assert bench(*args, *hint.removeprefix("try: ").split()).code == 0


def test_rows_of_a_suite_that_do_not_fit_are_skipped_and_named(
    machine: FakeMachine, bench: Bench
) -> None:
    done = bench("--suite", "long", "--eager", "--reps", 1, "--warmup", 0, "--json")
    assert done.code == 0
    assert done.err.count("warning: skipped decode · depth 8,192") == 2
    kinds = [row["workload"]["kind"] for row in done.document["rows"]]
    assert kinds == ["prefill"] * 2 + ["decode"] * 3 + ["prefix"] * 4 + ["mixed"] * 2


def test_the_config_section(machine: FakeMachine, bench: Bench, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("bench: {workload: prefill, batch: [1, 2], prompt_len: 5, reps: 2}\n")
    done = bench("--config", config, "--warmup", 0, "--json", "-q")
    assert [row["workload"]["batch"] for row in done.document["rows"]] == [1, 1, 2, 2]
    assert done.document["rows"][0]["tok_s"]["n"] == 2
    # A suite that is typed beats a workload in a file, whose lists then have no part.
    suite = bench("--config", config, "--suite", "quick", "--json")
    assert [row["workload"]["kind"] for row in suite.document["rows"]] == ["decode"] * 2
    assert f"bench.batch ({config}:1) has no part in the suite quick" in suite.err


@pytest.mark.parametrize("line", ["bacth: [1]", "batch: [0]", "reps: x", "percentiles: [200]"])
def test_mistakes_in_the_config_section(bench: Bench, tmp_path: Path, line: str) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"bench:\n  {line}\n")
    done = bench("--config", config)
    assert done.code == 2
    assert done.err.startswith(f"error: {config}:2:")


def test_the_printed_config_reads_back(bench: Bench, tmp_path: Path) -> None:
    args = ("--workload", "mixed", "--batch", "1,2,4", "--prompt-len", "9,10~20", "--print-config")
    printed = bench(*args).out
    config = tmp_path / "c.yaml"
    config.write_text(printed)
    assert "  batch: [1, 2, 4]\n" in printed
    assert bench("--config", config, "--print-config", model=None).out == printed


def test_what_measures_nothing_loads_no_torch() -> None:
    saved = Path(__file__).parents[3] / "benchmarks" / "h200" / "stages.json"
    runs = [["--help-metrics"], ["--help"], ["--graph"], ["--compare", str(saved), str(saved)]]
    script = (
        "import sys; from minivllm_cli.app import run\n"
        f"codes = [int(run(['bench', *args])) for args in {runs}]\n"
        "assert codes == [0, 0, 2, 0], codes\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([*REAL[:1], "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
