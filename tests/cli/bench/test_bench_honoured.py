"""What `bench` takes is honoured: by doing it, or by saying before anything is loaded that it will not."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cli.bench.conftest import Bench
from cli.bench.fake_bench_engine import Behaviour, FakeMachine
from cli.bench.test_bench_compare import DECODE, RATES, document
from minivllm_cli import engine as engine_factory
from minivllm_engine.core.errors import CapacityError

FEW = ("--reps", 1, "--warmup", 0, "--json", "-q")
PREFIX = ("--workload", "prefix", "--depth", 64, "--prompt-len", 2, "--gen-len", 2, "--eager")


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_verify_of_fewer_requests_than_every_nth_is_refused(
    machine: FakeMachine, bench: Bench
) -> None:
    args = (*PREFIX, "--batch", "1,2", "--num-prompts", 2)
    done = bench(*args, "--verify", 5)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: --verify 5 has nothing to do: 4 requests can reuse a prefix")
    assert done.err.endswith("\ntry: --verify 1\n")
    assert not machine.engines
    assert bench(*args, "--verify", 4, *FEW).document["verify"]["replayed"] == 1


def test_verify_of_fewer_lines_than_every_nth_is_refused(
    machine: FakeMachine, bench: Bench, tmp_path: Path
) -> None:
    line = {"prompt_token_ids": list(range(70)), "max_tokens": 1}
    path = write_lines(tmp_path / "in.jsonl", line, line, line)
    args = ("--workload", f"jsonl:{path}", "--batch", 1)
    done = bench(*args, "--verify", 4)
    assert (done.code, done.out) == (2, "")
    assert not machine.engines
    assert bench(*args, "--verify", 2, *FEW).document["verify"]["replayed"] == 1


def test_verify_that_replayed_nothing_has_not_passed(
    machine: FakeMachine, bench: Bench, tmp_path: Path
) -> None:
    lines = [{"prompt_token_ids": [n] * 70, "max_tokens": 1} for n in (1, 1, 2)]
    path = write_lines(tmp_path / "in.jsonl", *lines)
    args = ("--workload", f"jsonl:{path}", "--batch", 1)
    done = bench(*args, "--verify", 2, *FEW)
    assert done.code == 5
    assert "error: --verify 2 replayed nothing" in done.err
    assert done.err.endswith("\ntry: --verify 1\n")
    assert bench(*args, "--verify", 1, *FEW).code == 0


def test_a_pipe_is_read_once_for_all_rows(machine: FakeMachine, bench: Bench) -> None:
    reader, writer = os.pipe()
    os.write(writer, b'{"prompt_token_ids": [1, 2], "max_tokens": 2}\n')
    os.close(writer)
    try:
        done = bench("--workload", f"jsonl:/dev/fd/{reader}", "--batch", "1,2", "--eager", *FEW)
    finally:
        os.close(reader)
    assert done.code == 0, done.err
    assert [row["workload"]["batch"] for row in done.document["rows"]] == [1, 2]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ({"prompt_token_ids": [1, 999_999]}, "prompt token id 999999 is out of range"),
        ({"prompt_token_ids": []}, ""),
        ({"prompt_token_ids": [1], "stop_token_ids": [999_999]}, "stop_token_ids id 999999 is out"),
        ({"prompt_token_ids": [1], "min_tokens": 9, "max_tokens": 2}, "min_tokens 9 > max_tokens"),
        ({"prompt_token_ids": [1] * 5000}, "5000 prompt tokens + 1 > max_model_len 4096"),
    ],
)
def test_a_line_that_the_engine_would_refuse_is_refused_before_it_is_loaded(
    machine: FakeMachine, bench: Bench, tmp_path: Path, line: dict[str, Any], what: str
) -> None:
    path = write_lines(tmp_path / "in.jsonl", {"prompt_token_ids": [1]}, line)
    done = bench("--workload", f"jsonl:{path}")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {path}:2:") and what in done.err
    assert not machine.engines


@pytest.mark.parametrize("flag", ["--save", "--cache-dump"])
def test_the_lines_that_are_read_are_not_overwritten(
    machine: FakeMachine, bench: Bench, tmp_path: Path, flag: str
) -> None:
    path = write_lines(tmp_path / "in.jsonl", {"prompt_token_ids": [1]})
    before = path.read_bytes()
    more = ["--overwrite"] if flag == "--save" else []
    done = bench("--workload", f"jsonl:{path}", flag, path, *more)
    assert (done.code, done.out) == (2, "")
    assert f"{flag} and --workload are the same file" in done.err
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["--workload", "decode", "--set", "sampling.temperature=1"], "sampling.temperature"),
        (["--suite", "quick", "--set", "sampling.max_tokens=9"], "sampling.max_tokens"),
        (["--set", "chat.stats=false"], "chat.stats"),
        (["--set", "chat={stats: false}"], "chat.stats"),
    ],
)
def test_a_typed_key_that_bench_does_not_read_is_refused(
    machine: FakeMachine, bench: Bench, args: list[str], what: str
) -> None:
    done = bench(*args)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: --set ") and what in done.err.splitlines()[0]
    assert not machine.engines


def test_sampling_of_lines_is_that_of_the_config(
    machine: FakeMachine, bench: Bench, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "in.jsonl", {"prompt_token_ids": [1]})
    args = ("--workload", f"jsonl:{path}", "--batch", 1, "--set", "sampling.max_tokens=3")
    assert bench(*args, *FEW).code == 0


def test_keys_of_other_commands_in_a_file_are_left_alone(
    machine: FakeMachine, bench: Bench, tmp_path: Path
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("sampling: {temperature: 1.0}\nchat: {stats: false}\nmodel: demo\n")
    assert bench("--config", config, "--suite", "quick", *FEW, model=None).code == 0
    shape = bench("--config", config, "--shape", "0.8b", "--suite", "quick", *FEW, model=None)
    assert shape.code == 0


def test_a_model_that_is_set_and_a_shape_exclude_each_other(
    machine: FakeMachine, bench: Bench
) -> None:
    done = bench("--shape", "0.8b", "--set", "model=demo", model=None)
    assert (done.code, done.out) == (2, "")
    assert not machine.engines


def test_a_row_with_fewer_requests_than_its_batch_says_so(
    machine: FakeMachine, bench: Bench, tmp_path: Path
) -> None:
    machine.behaviour = Behaviour(device="cpu")
    args = ("--workload", "prefill", "--prompt-len", 3, "--num-prompts", 2, "--reps", 1)
    done = bench(*args, "--batch", "2,4")
    assert done.code == 0
    assert done.err.count("requests run at once") == 1
    assert "batch 4: no more than 2 requests run at once" in done.err
    path = write_lines(tmp_path / "in.jsonl", {"prompt_token_ids": [1], "max_tokens": 1})
    lines = bench("--workload", f"jsonl:{path}", "--batch", 8, "--reps", 1)
    assert "batch 8: no more than 1 request runs at once" in lines.err


@pytest.mark.parametrize(
    "args",
    [
        ["--device", "cpu"],
        ["--dtype", "fp32"],
        ["--max-num-seqs", "4"],
        ["--max-model-len", "99"],
        ["--set", "bench.reps=3"],
        ["--set", "engine.device=cpu"],
        ["--set", "model=demo"],
        ["--reps", "3"],
        ["--save", "x.json"],
        ["--cache-dump", "x.json"],
        ["--graph"],
        ["--verify", "3"],
    ],
)
def test_a_comparison_takes_nothing_that_it_would_ignore(
    bench: Bench, tmp_path: Path, args: list[str]
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document(RATES)))
    done = bench("--compare", path, path, *args, model=None)
    assert (done.code, done.out) == (2, "")
    assert "measures, and --compare only reads two saved runs" in done.err
    assert bench("--compare", path, path, "--set", "output.progress=off", model=None).code == 0


def test_rows_that_cannot_be_compared_are_told(bench: Bench, tmp_path: Path) -> None:
    run = document(RATES)
    run["rows"].append(json.loads(json.dumps(run["rows"][0])))
    run["rows"][1]["workload"] = DECODE | {"batch": 2}
    for sample in run["rows"][1]["samples"]:
        sample["itl_ms"] = None
    path = tmp_path / "a.json"
    path.write_text(json.dumps(run))
    done = bench("--compare", path, path, "--metric", "itl_ms", "--json", model=None)
    assert done.code == 0 and len(done.document["rows"]) == 1
    assert "warning: 1 of 2 common rows has no itl_ms to compare: decode · depth 4" in done.err
    assert "warning" not in bench("--compare", path, path, model=None).err


def test_an_engine_that_fails_in_a_replay_keeps_finished_rows(
    machine: FakeMachine, bench: Bench
) -> None:
    args = (*PREFIX, "--batch", 2, "--verify", 1, *FEW)
    steps: list[int] = []
    machine.behaviour = Behaviour(device="cpu", on_step=steps.append)
    assert bench(*args).code == 0
    machine.behaviour = Behaviour(device="cpu", fails_at=len(steps))
    done = bench(*args)
    assert done.code == 1
    assert "error: engine failed: the fan fell off" in done.err
    assert len(done.document["rows"]) == 2 and done.document["complete"] is False


def test_a_second_engine_that_cannot_be_opened_keeps_the_rows_of_the_first(
    machine: FakeMachine, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engine_factory.open_engine

    def once(*args: Any) -> Any:
        if machine.engines:
            raise CapacityError("no memory is left", hint="--device cpu")
        return real(*args)

    monkeypatch.setattr(engine_factory, "open_engine", once)
    done = bench("--suite", "stages", *FEW)
    assert done.code == 4
    assert [row["variant"] for row in done.document["rows"]] == ["naive", "kv cache"]
    assert "error: no memory is left" in done.err
