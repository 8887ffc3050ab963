"""What `bench` writes: formats, widths, the saved document, the streams."""

import csv
import io
import json
import re
from pathlib import Path

import pytest

from cli.bench.conftest import Bench
from cli.bench.fake_bench_engine import Behaviour, FakeMachine
from minivllm_cli.bench.plan import KV_CACHE, NAIVE
from minivllm_cli.bench.rows import Measured, pair_document
from minivllm_cli.bench.sampling import Sample
from minivllm_cli.bench.variant import EAGER, GRAPH, Variant, variants_of
from minivllm_cli.bench.workload import Workload, suite_workloads
from minivllm_cli.bench.writer import graphs_line, pair_line, payback_steps, rows_text

QUICK = ("--workload", "decode", "--batch", "1,2", "--depth", 4, "--gen-len", 3, "--reps", 5)


def test_the_table(machine: FakeMachine, bench: Bench) -> None:
    machine.behaviour = Behaviour(eager_s=0.004, graph_s=0.001)
    done = bench(*QUICK)
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].startswith("demo fp32, state fp32 · ")
    assert lines[0].endswith(" · 5 reps, 2 warm-ups")
    assert lines[1].startswith("minivllm 0.1.0") and "torch 2" in lines[1]
    assert lines[2] == "reads memory at 4.0 GB/s (measured now)"
    assert lines[3] == "start: weights 1.5 s · capture 2.0 s, 3 graphs"
    assert lines[5] == "decode · depth 4 · gen 3"
    assert lines[6].split() == (
        ["batch", "variant", "in/out", "tok/s", "(min–max)", "ITL", "p50/p99", "ms", "limit", "hit"]
    )
    row = r" +2 +graph +8/6 +[\d.,]+ \([\d.,]+–[\d.,]+\) +[\d.]+/[\d.]+ +[\d.]+% +0.0%"
    assert any(re.fullmatch(row, line) for line in lines)
    pairs = [line for line in lines if "graph / eager" in line]
    assert pairs == [
        f"      graph / eager: 4.00× ±0.00 · tokens equal {equal}" for equal in ("5/5", "10/10")
    ]
    assert lines[-1].startswith("graphs: 3 sizes · capture 2.0 s · 3.00 MiB = 1,536 KV tokens")
    assert lines[-1].endswith("pays back after 667 steps (batch 1), 667 steps (batch 2)")
    assert max(map(len, lines[:-1])) <= 80


def row(kind: str, variant: str) -> dict[str, object]:
    figures = {"p50": 123.4, "p99": 2345.6}
    return {
        "workload": {"kind": kind, "batch": 256},
        "variant": variant,
        "samples": [{"in_tokens": 512, "out_tokens": 8192}],
        "tok_s": {"median": 8_760.1, "min": 8_686.2, "max": 8_890.3},
        "limit_fraction": 0.6123,
        "prefix_hit": 0.97,
        "kv_hit": 0.98,
        "itl_ms": figures,
        "ttft_ms": figures,
    }


@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        ("decode", "graph"),
        ("prefill", "graph"),
        ("mixed", "graph warm"),
        ("prefix", "graph warm"),
        ("jsonl", "graph"),
        ("stages", "kv cache"),
    ],
)
def test_k40_rows_fit_80_columns_and_stand_below_their_names(kind: str, variant: str) -> None:
    *_, head, first = rows_text([row(kind, variant)], (50.0, 99.0), heading=True).splitlines()
    (next_,) = rows_text([row(kind, "x")], (50.0, 99.0), heading=False).splitlines()
    assert max(len(head), len(first)) <= 80
    assert len(head) == len(first) == len(next_)


def test_rows_come_out_as_they_finish(machine: FakeMachine, bench: Bench) -> None:
    machine.behaviour = Behaviour(device="cpu", fails_at=60)
    done = bench(
        "--workload",
        "prefill",
        "--prompt-len",
        "1,2,3,4,5,6,7,8,9",
        "--batch",
        1,
        "--format",
        "jsonl",
    )
    assert done.code == 1
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [row["workload"]["prompt_len"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8][: len(rows)]
    assert rows and all(row["kind"] == "bench-row" for row in rows)


def test_csv_and_markdown(machine: FakeMachine, bench: Bench) -> None:
    found = list(csv.DictReader(io.StringIO(bench(*QUICK, "--format", "csv").out)))
    assert [(row["variant"], row["batch"]) for row in found] == (
        [("eager", "1"), ("graph", "1"), ("eager", "2"), ("graph", "2")]
    )
    assert found[3]["in_tokens"] == "8" and float(found[3]["tok_s"]) > 0
    assert found[0]["itl_ms_p99"] and not found[0]["ttft_ms_p50"]
    lines = bench(*QUICK, "--format", "md").out.splitlines()
    assert lines[0].startswith("| workload | batch | variant | tok/s")
    assert len(lines) == 6
    assert all(line.count("|") == lines[0].count("|") for line in lines)


def test_a_saved_file_is_replaced_only_where_that_is_asked_for(
    machine: FakeMachine, bench: Bench, tmp_path: Path
) -> None:
    path = tmp_path / "base.json"
    path.write_text("precious")
    done = bench(*QUICK, "--save", path)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: {path} exists\ntry: --overwrite, or --save with another name\n"
    assert path.read_text() == "precious" and not machine.engines
    assert bench(*QUICK, "--save", path, "--overwrite").code == 0
    assert json.loads(path.read_text())["complete"] is True


def test_one_repetition_has_no_spread(machine: FakeMachine, bench: Bench) -> None:
    lines = bench(*QUICK[:-1], 1).out.splitlines()
    pairs = [line for line in lines if "graph / eager" in line]
    assert len(pairs) == 2
    assert all(re.search(r": [\d.]+× · tokens equal", line) for line in pairs)


def measured(workload: Workload, variant: Variant, token: int = 2, cached: int = 0) -> Measured:
    one = Sample(1.0, 2, 2, 8, ((1, token),), 8, cached, cached)
    return Measured(workload, variant, (one, one), (1, 2), (8, 2))


def test_cold_and_warm_have_no_ratio_where_nothing_was_reused() -> None:
    workload = suite_workloads("prefix")[0]
    cold, warm = variants_of(workload, (EAGER,))
    pair = pair_document(measured(workload, cold), measured(workload, warm))
    assert pair["speed_up"] is None
    assert pair_line(pair) == "      eager warm / eager cold: tokens equal 2/2"
    pair = pair_document(measured(workload, cold), measured(workload, warm, cached=4))
    assert pair_line(pair) == "      eager warm / eager cold: 1.00× ±0.00 · tokens equal 2/2"
    pair = pair_document(measured(workload, EAGER), measured(workload, GRAPH))
    assert pair["speed_up"]["ratio"] == 1.0


def test_the_saved_document(machine: FakeMachine, bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    done = bench(*QUICK, "--save", path, "--set", "engine.max_num_seqs=3", "-q")
    assert done.code == 0 and done.err == ""
    document = json.loads(path.read_text())
    assert (document["kind"], document["schema_version"], document["complete"]) == (
        "bench",
        1,
        True,
    )
    assert document["config"]["engine"]["max_num_seqs"] == 3
    assert document["sources"]["engine"]["max_num_seqs"].startswith("--set engine.max")
    assert document["env"]["torch"] and document["env"]["schema_version"] == 1
    assert document["model"]["hash"].startswith("sha256:")
    assert document["load"] == {
        "weights_s": 1.5,
        "compile_s": 0.0,
        "capture_s": 2.0,
        "graph_sizes": [1, 2, 4],
        "graph_bytes": 3 << 20,
        "graph_bytes_planned": 0,
    }
    assert document["gpu_state"] == {
        "clock_mhz": [], "power_cap_w": 0, "temperature_c": [], "other_pids": []
    }  # fmt: skip
    row = document["rows"][0]
    assert row["workload"] == {"kind": "decode", "batch": 1, "depth": 4, "gen_len": 3}
    assert row["peak_bytes"] == 5 << 20
    assert row["tok_s"]["n"] == 5 and row["itl_ms"]["n"] == 15
    assert row["ttft_ms"] == {} and row["tpot_ms"] == {}


def test_percentiles_that_were_asked_for(machine: FakeMachine, bench: Bench) -> None:
    done = bench(*QUICK, "--percentiles", "99.9,10", "--json")
    figures = done.document["rows"][0]["itl_ms"]
    assert [key for key in figures if key.startswith("p")] == ["p10", "p99.9"]
    assert "ITL p10/p99.9 ms" in done.err


def test_tpot_leaves_single_tokens_out(machine: FakeMachine, bench: Bench) -> None:
    args = ("--workload", "mixed", "--prompt-len", 4, "--batch", 1, "--eager", "--json", "-q")
    many = bench(*args, "--gen-len", 4).document["rows"][0]
    one = bench(*args, "--gen-len", 1).document["rows"][0]
    assert many["tpot_ms"]["n"] == many["e2e_ms"]["n"] == many["ttft_ms"]["n"] == 5
    assert one["tpot_ms"] == {} and one["itl_ms"] == {}
    sample = many["samples"][0]
    expected = (sample["e2e_ms"] - sample["ttft_ms"]) / 3
    assert sample["tpot_ms"] == pytest.approx(expected)


def test_capture_that_never_pays_back_is_not_said_to() -> None:
    load = {"graph_sizes": [1], "capture_s": 2.0, "graph_bytes": 0}
    rows = [
        {"variant": variant, "workload": {"kind": "decode", "batch": 1}, "itl_ms": {"mean": ms}}
        for variant, ms in (("eager", 8.0), ("graph", 4.0))
    ]
    assert payback_steps(load, rows) == [(1, pytest.approx(500))]
    rows[1]["itl_ms"] = {"mean": 9.0}
    assert payback_steps(load, rows) == []
    assert "pays back" not in (graphs_line(load, rows, 0) or "")
    assert graphs_line({"graph_sizes": []}, rows, 0) is None


def test_titles_say_what_is_not_in_the_columns() -> None:
    titles = [workload.title for workload in suite_workloads("long")]
    assert titles[0] == "prefill · prompt 512"
    assert titles[2] == titles[3] == "decode · depth 512 · gen 128"
    assert "prefix · depth 512 · prompt 64 · requests 16 · gen 16 · groups 2" in titles


def test_help_metrics(bench: Bench) -> None:
    done = bench("--help-metrics", model=None)
    assert done.code == 0
    for metric in ("TTFT", "ITL", "TPOT", "E2E", "tok/s", "queue"):
        assert re.search(rf"^{metric} +\S", done.out, re.MULTILINE)
    assert max(map(len, done.out.splitlines())) <= 80


def test_only_variants_that_sum_in_other_orders_say_so_where_they_part() -> None:
    for suite, variants, said in (
        ("stages", (NAIVE, KV_CACHE), True),
        ("quick", (EAGER, GRAPH), False),
    ):
        workload = suite_workloads(suite)[0]
        base, other, same = (
            measured(workload, variant, token)
            for variant, token in zip((*variants, variants[1]), (2, 3, 2), strict=True)
        )
        line = pair_line(pair_document(base, other))
        assert "token 1: 2 and 3" in line and ("sum in different orders" in line) is said
        assert "orders" not in pair_line(pair_document(base, same))
