"""`bench --compare`: what is noise, what is slower, what cannot be compared, and that nothing is trusted."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.bench.conftest import Bench, Shown
from cli.bench.fake_bench_engine import FakeMachine

BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "h200"
DECODE = {"kind": "decode", "batch": 1, "depth": 4, "gen_len": 8}
RATES = [100.0, 101.0, 99.5, 100.4, 100.2, 99.8]


def document(rates: list[float], **changes: Any) -> dict[str, Any]:
    samples: list[dict[str, Any]] = [
        {"tok_s": r, "wall_s": 10 / r, "itl_ms": 1000 / r} for r in rates
    ]
    for sample in samples:
        sample |= dict.fromkeys(("ttft_ms", "queue_ms", "tpot_ms", "e2e_ms"))
    return {
        "schema_version": 1,
        "kind": "bench",
        "complete": True,
        "env": {"torch": "2.11", "gpus": []},
        "config": {"engine": {"max_num_seqs": 8}},
        "model": {"name": "demo", "hash": "sha256:1"},
        "device": {"kind": "cuda", "name": "H200"},
        "rows": [{"workload": dict(DECODE), "variant": "graph", "samples": samples}],
    } | changes


@pytest.fixture
def compare(bench: Bench, tmp_path: Path) -> Any:
    def call(base: Any, new: Any, *args: str) -> Shown:
        paths = []
        for name, content in (("base.json", base), ("new.json", new)):
            path = tmp_path / name
            path.write_text(content if isinstance(content, str) else json.dumps(content))
            paths.append(path)
        return bench("--compare", *paths, *args, model=None)

    return call


@pytest.mark.parametrize(
    ("factor", "verdict", "code"),
    [(1.2, "faster", 0), (0.8, "slower", 5), (1.0, "within noise", 0), (0.98, "slower", 0)],
)
def test_verdicts_and_the_exit_code(compare: Any, factor: float, verdict: str, code: int) -> None:
    done = compare(
        document(RATES), document([r * factor for r in RATES]), "--fail-if-slower", "3%", "--json"
    )
    assert done.code == code
    (row,) = done.document["rows"]
    assert row["verdict"] == verdict
    assert row["change"] == pytest.approx(factor - 1)
    assert row["interval"][0] <= row["change"] <= row["interval"][1]
    if code:
        assert "error: slower by more than 3.0%: 1 of 1 row\n" in done.err
        assert "decode · depth 4 · gen 8 · batch 1 · graph: 25.0% slower" in done.err


def test_a_slow_down_within_noise_fails_nothing(compare: Any) -> None:
    base = [100.0, 60.0, 140.0, 95.0, 105.0]
    done = compare(document(base), document([r * 0.9 for r in base]), "--fail-if-slower", "3%")
    assert done.code == 0
    assert "within noise" in done.out


def test_latencies_are_slower_when_they_grow(compare: Any) -> None:
    slow = document([r * 0.8 for r in RATES])
    done = compare(document(RATES), slow, "--metric", "itl_ms", "--fail-if-slower", "3%", "--json")
    assert done.code == 5
    assert done.document["rows"][0]["verdict"] == "slower"
    assert done.document["rows"][0]["change"] == pytest.approx(0.25)


def test_too_few_samples_are_no_verdict(compare: Any) -> None:
    few = document(RATES[:3])
    assert "too few" in compare(few, few).out
    done = compare(few, few, "--fail-if-slower", "3%")
    assert done.code == 2
    assert "too few" in done.out, "the table comes first"
    assert (
        "error: --fail-if-slower: too few samples to tell a change from noise in 1 of 1 row\n"
        in done.err
    )
    assert "why: 5 are needed in both runs, so each --save with --reps 5 or more" in done.err


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"device": {"kind": "cuda", "name": "A100"}}, "GPU (cuda H200, cuda A100)"),
        ({"model": {"name": "demo", "hash": "sha256:2"}}, "model (demo, demo)"),
    ],
)
def test_runs_that_differ_need_force(compare: Any, changes: dict[str, Any], what: str) -> None:
    done = compare(document(RATES), document(RATES, **changes))
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: runs differ in {what}\ntry: --force\n"
    forced = compare(document(RATES), document(RATES, **changes), "--force")
    assert forced.code == 0
    assert f"warning: runs differ in {what}" in forced.err


def test_other_workloads_need_force_and_only_common_rows_are_compared(compare: Any) -> None:
    base, new = document(RATES), document(RATES)
    new["rows"].append(copy.deepcopy(new["rows"][0]) | {"variant": "eager"})
    assert "runs differ in workload (0 and 1 without a pair)" in compare(base, new).err
    forced = compare(base, new, "--force", "--json")
    assert [row["variant"] for row in forced.document["rows"]] == ["graph"]


@pytest.mark.parametrize("flags", [(), ("--force",), ("--metric", "ttft_ms")])
def test_runs_without_a_common_row_are_refused_at_once(
    compare: Any, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    def run(variant: str, depth: int, batches: range) -> dict[str, Any]:
        (row,) = document(RATES)["rows"]
        rows = [
            row | {"variant": variant, "workload": DECODE | {"depth": depth, "batch": batch}}
            for batch in batches
        ]
        return document(RATES, rows=rows, device={"kind": "cpu", "name": variant})

    done = compare(run("graph", 4, range(1, 2)), run("eager", 512, range(1, 6)), *flags)
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines() == [
        "error: no row is in both runs: there is nothing to compare",
        f"why: {tmp_path / 'base.json'} has decode · depth 4 · gen 8 · batch 1 · graph",
        f"     {tmp_path / 'new.json'} has "
        + ", ".join(f"decode · depth 512 · gen 8 · batch {n} · eager" for n in (1, 2, 3))
        + " and 2 more",
    ]


def test_settings_that_differ_come_first(compare: Any) -> None:
    new = document(
        RATES, config={"engine": {"max_num_seqs": 16}}, env={"torch": "2.13", "gpus": []}
    )
    lines = compare(document(RATES), new).out.splitlines()
    assert lines[:3] == ["config engine.max_num_seqs: 8 → 16", "env torch: 2.11 → 2.13", ""]
    assert lines[3].split()[:4] == ["batch", "variant", "tok_s", "BASE"]
    assert lines[4] == "decode · depth 4 · gen 8"
    assert lines[5].split()[:4] == ["1", "graph", "100.1", "100.1"]


def test_a_run_that_was_interrupted_is_said_to_be(compare: Any) -> None:
    done = compare(document(RATES, complete=False), document(RATES))
    assert "base.json was interrupted: it has some of its rows" in done.err


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[1]",
        "\x00",
        '{"kind": NaN}',
        document(RATES, rows=[{"workload": {}, "variant": "a", "samples": []}]),
        document(RATES, model={"name": "\x1b[2J", "hash": "x"}),
        document([-1.0]),
        document([1e300]),
        document(RATES, kind="cache"),
        document(
            RATES, rows=[{"workload": {"kind": {"deep": 1}}, "variant": "a", "samples": [{}]}]
        ),
        document(RATES, rows=[]),
        document(RATES, rows=["a row"]),
        document(RATES, rows={"a": 1}),
    ],
    ids=range(14),
)
def test_files_that_are_no_saved_runs(compare: Any, content: Any) -> None:
    done = compare(document(RATES), content)
    assert (done.code, done.out) == (2, "")
    assert "new.json is no saved run" in done.err
    assert "try: FILE of: minivllm bench --save FILE" in done.err


def edited(change: Callable[[list[dict[str, Any]]], Any], **workload: Any) -> dict[str, Any]:
    """A run of two rows, of which `change` does something to the rows."""
    run = document(RATES)
    second = copy.deepcopy(run["rows"][0])
    second["workload"] = workload or DECODE | {"batch": 8}
    run["rows"].append(second)
    change(run["rows"])
    return run


PREFIX = {"kind": "prefix", "batch": 8, "depth": 9, "prompt_len": "3~4", "num_prompts": 9}
PREFIX |= {"gen_len": 2, "groups": 1}


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (
            edited(lambda rows: rows.append(copy.deepcopy(rows[1]))),
            "rows.2: decode · depth 4 · gen 8 · batch 8 · graph is there twice, as rows.1 too",
        ),
        (
            edited(lambda rows: rows[1]["workload"].update(batch=1)),
            "rows.1: decode · depth 4 · gen 8 · batch 1 · graph is there twice, as rows.0 too",
        ),
        (edited(lambda rows: rows[1].pop("variant")), "rows.1.variant: Field required"),
        (edited(lambda rows: rows[1].pop("samples")), "rows.1.samples: Field required"),
        (
            edited(lambda rows: rows[1]["workload"].pop("batch")),
            "rows.1.workload: batch is missing",
        ),
        (
            edited(lambda rows: rows[1]["workload"].pop("groups"), **PREFIX),
            "rows.1.workload: groups is missing",
        ),
        (
            edited(lambda rows: rows[1]["workload"].update(kind="decoding")),
            "rows.1.workload: kind decoding is none of prefill, ",
        ),
        (
            edited(lambda rows: rows[1]["workload"].update(batch="8")),
            "rows.1.workload: batch is no number",
        ),
        (edited(lambda rows: rows[1]["workload"].update(depth=4.5)), "rows.1.workload.depth"),
        (
            edited(lambda rows: rows[1]["samples"][2].pop("tok_s")),
            "rows.1.samples.2.tok_s: Field required",
        ),
        (edited(lambda rows: rows[1]["samples"][2].update(tok_s="9")), "rows.1.samples.2.tok_s: "),
        (edited(lambda rows: rows[1]["samples"][0].update(itl_ms="9")), "rows.1.samples.0.itl_ms"),
        (edited(lambda rows: rows[1]["samples"][0].update(tok_s=0)), "rows.1.samples.0.tok_s: "),
        (edited(lambda rows: rows[1].update(samples=[])), "rows.1.samples: List should have"),
    ],
)
@pytest.mark.parametrize("is_base", [True, False])
def test_a_file_that_was_edited_by_hand_is_refused_by_its_name_and_place(
    compare: Any, run: dict[str, Any], why: str, is_base: bool
) -> None:
    good = edited(len)
    done = compare(run, good) if is_base else compare(good, run)
    assert (done.code, done.out) == (2, "")
    what, shown, _ = done.err.splitlines()
    assert what.startswith("error: ")
    assert what.endswith(f"{'base' if is_base else 'new'}.json is no saved run")
    assert shown.startswith(f"why: {why}")


def test_files_of_an_earlier_version_are_read(bench: Bench) -> None:
    saved = BENCHMARKS / "decode.json"
    done = bench("--compare", saved, saved, "--fail-if-slower", "3%", "--json", "-q", model=None)
    assert done.code == 0, done.err
    assert [row["variant"] for row in done.document["rows"]] == ["eager", "graph"] * 3


def test_runs_with_rows_of_every_kind_are_read_back(
    machine: FakeMachine, bench: Bench, tmp_path: Path
) -> None:
    few = ("--reps", 1, "--warmup", 0, "-q")
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt_token_ids": [1, 2], "max_tokens": 2}\n')
    for name, args in (
        ("prefix", ("--suite", "prefix")),
        ("stages", ("--suite", "stages")),
        ("spans", ("--workload", "mixed", "--prompt-len", "3~1k,5~5", "--gen-len", "1~3")),
        ("lines", ("--workload", f"jsonl:{lines}", "--batch", 1, "--num-prompts", 1)),
    ):
        path = tmp_path / f"{name}.json"
        assert bench(*args, "--save", path, *few).code == 0
        assert bench("--compare", path, path, model=None).code == 0


def test_escapes_in_settings_do_not_reach_the_terminal(compare: Any) -> None:
    done = compare(document(RATES), document(RATES, config={"x": "a\x1b[2Jb"}))
    assert done.code == 0 and "\x1b" not in done.out
    done = compare(document(RATES), document(RATES, config={"x": "a\udc9b31m\nforged"}))
    assert done.code == 0 and "a\\udc9b31m\\nforged" in done.out.splitlines()[1]


def test_wrong_flags(compare: Any) -> None:
    base = document(RATES)
    assert "'toks'" in compare(base, base, "--metric", "toks").err
    assert (
        "--fail-if-slower: 'x' is not a share" in compare(base, base, "--fail-if-slower", "x").err
    )
    assert "--format csv: a comparison is" in compare(base, base, "--format", "csv").err
    assert "no row of both runs has ttft_ms" in compare(base, base, "--metric", "ttft_ms").err
    assert "--batch measures" in compare(base, base, "--batch", "1").err


@pytest.mark.parametrize("metric", ["tok_s", "wall_s", "itl_ms"])
def test_any_percentage_that_is_reported_can_be_the_limit(compare: Any, metric: str) -> None:
    slow = document([r / 4 for r in RATES])
    for limit, code in (("99%", 5), ("0.99", 5), ("299%", 5), ("301%", 0), ("300000%", 0)):
        done = compare(document(RATES), slow, "--metric", metric, "--fail-if-slower", limit)
        assert done.code == code, limit
        assert (": 300.0% slower" in done.err) == bool(code)


@pytest.mark.parametrize("text", ["1", "3", "300", " 300 ", "1.5"])
def test_a_number_that_was_hardly_meant_as_a_share_comes_with_its_percentage(
    compare: Any, text: str
) -> None:
    base = document(RATES)
    done = compare(base, base, f"--fail-if-slower={text}")
    assert (done.code, done.out) == (2, "")
    *_, hint = done.err.splitlines()
    assert hint == f"try: --fail-if-slower {text.strip()}%"
    assert compare(base, base, *hint.removeprefix("try: ").split()).code == 0


def test_a_limit_without_end_is_refused(compare: Any) -> None:
    base = document(RATES)
    done = compare(base, base, f"--fail-if-slower={'9' * 400}%")
    assert (done.code, done.out) == (2, "")
    assert done.err.endswith("try: --fail-if-slower 3%\n")
