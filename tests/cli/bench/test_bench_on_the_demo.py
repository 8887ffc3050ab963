"""`bench` on the real engine with the demo model, with very little to do."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.bench.conftest import Bench
from minivllm_cli import engine as engine_factory
from minivllm_cli.bench import plan
from minivllm_cli.bench.workload import Workload
from minivllm_cli.config.bench_options import Length

FEW = ("--reps", 2, "--warmup", 1, "--json", "-q")


@pytest.fixture(autouse=True)
def quick_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_factory, "read_bandwidth", lambda device: 10e9)


def test_decode_and_its_fraction_of_the_limit(bench: Bench) -> None:
    done = bench("--workload", "decode", "--batch", "1,3", "--depth", 70, "--gen-len", 4, *FEW)
    assert done.code == 0, done.err
    for row in done.document["rows"]:
        batch = row["workload"]["batch"]
        assert [s["out_tokens"] for s in row["samples"]] == [4 * batch] * 2
        assert [s["steps"] for s in row["samples"]] == [4, 4]
        assert row["limit_fraction"] > 0 and row["peak_bytes"] is None
        assert row["prefix_hit"] == 0
    assert done.document["load"]["weights_s"] > 0
    assert done.document["load"]["capture_s"] == 0
    assert done.document["gpu_state"]["clock_mhz"] == []
    # floor / measured, by the sheet of the demo model: 5.81 M weights, states, keys and values
    row = done.document["rows"][0]
    step = sum(s["wall_s"] for s in row["samples"]) / 2 / 4
    states = 6 * (8 * 32 * 64 + 768 * 3) * 4
    floor = (4 * 5_811_000 + 2 * states + 71.5 * 2 * 2 * 2 * 64 * 4) / 10e9
    assert row["limit_fraction"] == pytest.approx(floor / step, rel=0.25)


def test_naive_and_cached_decoding_agree(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    few = Workload("stages", 1, gen=Length(5, 5), depth=70)
    monkeypatch.setattr(plan, "suite_workloads", lambda suite: [few])
    done = bench("--suite", "stages", "--reps", 1, "--warmup", 0, "--json", "-q")
    assert done.code == 0, done.err
    (pair,) = done.document["equal"]
    assert pair["variants"] == ["naive", "kv cache"]
    assert (pair["equal"], pair["of"]) == (1, 1)
    assert pair["speed_up"]["ratio"] > 0


def test_prefixes_are_found_and_verified(bench: Bench, tmp_path: Path) -> None:
    dump = tmp_path / "cache.json"
    done = bench(
        *("--workload", "prefix", "--depth", 128, "--prompt-len", 9, "--gen-len", 3),
        *("--batch", 2, "--num-prompts", 4, "--groups", 2, "--verify", 2, "--cache-dump", dump),
        *FEW,
    )
    assert done.code == 0, done.err
    cold, warm = done.document["rows"]
    assert (cold["prefix_hit"], warm["prefix_hit"]) == (0, pytest.approx(128 / 137))
    assert warm["kv_hit"] == warm["prefix_hit"]
    (pair,) = done.document["equal"]
    assert pair["equal"] == pair["of"] == 8
    verify = done.document["verify"]
    assert (verify["reused"], verify["replayed"], verify["different"]) == (4, 2, 0)
    assert json.loads(dump.read_text())["source"] == "bench"


def test_lines_of_a_file(bench: Bench, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "Define harbor."}], "max_tokens": 3},
        {"prompt_token_ids": [1, 2, 3], "max_tokens": 2, "temperature": 0, "n": 2},
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = bench("--workload", f"jsonl:{path}", "--batch", 2, *FEW)
    assert done.code == 0, done.err
    (row,) = done.document["rows"]
    assert [sample["out_tokens"] for sample in row["samples"]] == [7, 7]
    path.write_text('{"prompt": 1}\n')
    bad = bench("--workload", f"jsonl:{path}")
    assert bad.code == 2
    assert bad.err.startswith(f"error: {path}:1:")
