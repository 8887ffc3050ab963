"""`inspect-cache run` and `--cache-dump` with the real engine: exact documents, sums, signals."""

import json
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from cli.chat.program import Chat
from cli.chat.terminal import CTRL_D
from cli.in_process import InProcess
from cli.program import REAL, Finished, Program, read_records, wait_for

SMALL = ["--set", "engine.cpu_memory=64MiB", "--set", "cache.block_size=16"]
ONE_BY_ONE = [*SMALL, "--max-num-seqs", "1"]


@pytest.fixture
def real(tmp_path: Path) -> Program:
    return InProcess(tmp_path, list(REAL))


def ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def prompts(*each: list[int], **more: Any) -> list[dict[str, Any]]:
    sampling = {"max_tokens": 2, "ignore_eos": True, "temperature": 0, **more}
    return [{"prompt_token_ids": one, "sampling": sampling} for one in each]


SYSTEM = ids(1, 200)
# Two that differ after 200 tokens, a third, the second again, one that is short, one that is wrong.
SCRIPT = [
    *prompts(*(SYSTEM + ids(10 + i, 60) for i in range(3)), SYSTEM + ids(11, 60), ids(99, 20)),
    {"prompt_token_ids": [10_000_000]},
]


def document(done: Finished) -> dict[str, Any]:
    (record,) = done.records
    return record


def test_a_scripted_run_is_told_exactly(real: Program, tiny_model: Path) -> None:
    source = real.write_lines("in.jsonl", SCRIPT)
    done = real.run("inspect-cache", tiny_model, "run", "-i", source, *ONE_BY_ONE, "--json", "-q")
    assert done.code == 3, "as generate: one request failed"
    assert done.err_lines == ["error: 1 of 6 requests failed: invalid_field 1"]
    found = document(done)
    assert (found["schema_version"], found["kind"], found["source"]) == (1, "cache", "run")
    names = ("id", "parent", "start", "end", "blocks", "hits", "refs", "snapshot", "recomputed")
    assert [tuple(node[name] for name in names) for node in found["nodes"]] == [
        (1, 0, 0, 192, 12, 3, 0, 192, 1),
        (2, 1, 192, 256, 4, 0, 0, 256, 0),
        (3, 1, 192, 256, 4, 1, 0, 256, 0),
        (4, 1, 192, 256, 4, 0, 0, 256, 0),
        (5, 0, 0, 16, 1, 0, 0, None, 0),
    ]
    assert [node["age"] for node in found["nodes"]] == [1, 4, 1, 2, 0]
    assert [node["recomputed_tokens"] for node in found["nodes"]] == [192, 0, 0, 0, 0]
    assert not any("text" in node for node in found["nodes"])
    assert found["hit"] == {
        "requests": 5,
        "prompt_tokens": 4 * 260 + 20,
        "kv_tokens": 192 + 192 + 256,
        "usable_tokens": 192 + 256,
        "restored_tokens": 0,
        "kv": 640 / 1060,
        "usable": 448 / 1060,
    }
    assert found["miss_counts"] == {"new_prefix": 2, "no_snapshot": 1, "below_granularity": 1}
    assert found["misses"] == {"new_prefix": 0.5, "no_snapshot": 0.25, "below_granularity": 0.25}
    assert found["evicted"] == {"snapshots": 0, "kv_blocks": 0}
    pools = found["pools"]
    assert [pools["kv"][name] for name in ("used", "peak", "cached")] == [0, 17, 25]
    assert [pools["state"][name] for name in ("used", "peak", "total")] == [0, 1, 1]
    assert [pools["snapshots"][name] for name in ("used", "peak")] == [4, 4]
    for row in found["devices"][0]["rows"]:
        measured = row["measured"]
        assert (measured is None) == (
            row["name"] not in ("weights", "state slots", "snapshots", "KV blocks")
        )
        assert measured is None or measured == pytest.approx(row["bytes"], rel=0.01)
    assert found["warnings"] == []


def test_a_dump_shows_what_the_live_view_did(real: Program, tiny_model: Path) -> None:
    source = real.write_lines("in.jsonl", SCRIPT)
    live = real.run("inspect-cache", "run", tiny_model, "-i", source, *ONE_BY_ONE)
    assert live.code == 3
    generated = real.run(
        *("generate", tiny_model, "-i", source, "-o", "out.jsonl", "--cache-dump", "cache.json"),
        *ONE_BY_ONE,
    )
    assert generated.code == 3
    dump = real.run("inspect-cache", "cache.json")
    assert (dump.code, dump.err) == (0, "")
    assert dump.out == live.out
    assert re.search(
        r"^└─ \[0\.\.16\) {8} 1 blk  hits 0  ref 0  –     +[0-9a-f]{8}$", live.out, re.M
    )
    assert "│  ↑ 192 tokens computed again 1×, before there was a snapshot" in live.out
    for text in (
        "prefix cache: 5 segments · 25/",
        "  KV found           640   60.4%",
        "  usable             448   42.3%  KV and a state were there",
        "  lost               192   18.1%  computed again: no state to go on from",
        "misses: 4 of 5 requests\n  new_prefix           2   50%  nothing in the cache goes on like this",
    ):
        assert text in live.out
    # C14: the totals are the sums of what the records say.
    usage = [r["usage"] for r in read_records(real.home / "out.jsonl") if r["status"] == "ok"]
    found = json.loads((real.home / "cache.json").read_text())
    assert found["source"] == "generate"
    hit = found["hit"]
    assert hit["prompt_tokens"] == sum(u["prompt_tokens"] for u in usage)
    assert hit["usable_tokens"] == sum(u["cached_tokens"] for u in usage) > 0
    assert hit["kv_tokens"] == sum(u["kv_matched"] for u in usage)
    assert sum(found["miss_counts"].values()) == sum(u["miss_reason"] is not None for u in usage)


def test_evictions_and_advice_that_the_planner_accepts(real: Program, tiny_model: Path) -> None:
    script = prompts(*(ids(seed, 150) for seed in (1, 2, 3, 4) * 2))
    source = real.write_lines("in.jsonl", script)
    args = ["inspect-cache", tiny_model, "run", "-i", source, *ONE_BY_ONE]
    tight = real.run(*args, "--set", "cache.snapshot_memory=62KiB")
    assert re.search(r"^evicted: [1-9]\d* snapshots, 0 KV blocks$", tight.out, re.M)
    assert re.search(r"↑ KV cached, no snapshot: 144 tokens computed again 1×", tight.out)
    assert "  evicted  " in tight.out
    flag = re.search(r"room: --set (cache.snapshot_memory=\d+KiB)\s+fits", tight.out)
    assert flag is not None
    assert "twice" not in tight.out
    more = real.run(*args, "--set", flag[1])
    assert more.code == 0
    usable = re.compile(r"usable +([\d,]+)")
    assert int(usable.search(more.out)[1]) > int(usable.search(tight.out)[1])  # type: ignore[index]


def test_text_is_shown_only_when_asked_for_and_never_raw(real: Program, tiny_model: Path) -> None:
    secret = "pass\x1b[2Jword\n\x9b7🙂 geheim Ä " * 6
    source = real.write_lines("in.jsonl", [{"prompt": secret, "max_tokens": 1}])
    args = ["inspect-cache", tiny_model, "run", "-i", source, *SMALL]
    saved = real.run(*args, "--show-text", "--json")
    text = document(saved)["nodes"][0]["text"]
    assert secret.encode().startswith(text.encode()[:60])
    (real.home / "cache.json").write_bytes(saved.stdout)
    shown = real.run("inspect-cache", "cache.json", "--show-text")
    assert r"“pass\x1b[2Jword\n\x9b7\U0001f642 geheim Ä pass" in shown.out
    assert re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown.out) is None
    assert max(map(len, shown.out.splitlines())) <= 80
    silent = real.run("inspect-cache", "cache.json")
    assert silent.code == 0 and "geheim" not in silent.out
    dumped = real.run("generate", tiny_model, "-i", source, "--cache-dump", "d.json", *SMALL)
    assert dumped.code == 0 and b"geheim" not in (real.home / "d.json").read_bytes()
    refused = real.run("inspect-cache", "d.json", "--show-text")
    assert (refused.code, refused.out) == (2, "")
    assert (
        refused.err_lines[0] == "error: --show-text: d.json holds no text, only counts and hashes"
    )


def test_short_prompts_are_pointed_out(real: Program, tiny_model: Path) -> None:
    source = real.write_lines("in.jsonl", prompts(*(ids(seed, 30) for seed in range(3))))
    done = real.run("inspect-cache", tiny_model, "run", "-i", source, *SMALL)
    assert "warning: 3 of 3 prompts are too short to hit: at least 65 tokens" in done.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_shows_what_is_known(
    real: Program, tiny_model: Path, number: signal.Signals
) -> None:
    lines = [*prompts(ids(1, 100)), *prompts(*[ids(2, 100)] * 3, max_tokens=4_000)]
    source = real.write_lines("in.jsonl", lines)
    process = real.start("inspect-cache", tiny_model, "run", "-i", source, *ONE_BY_ONE)
    real.interrupt_when(lambda: real.stderr_has("generate 1/4"), process, number)
    wait_for(lambda: real.stderr_has("Ctrl-C again to abort now"))
    process.send_signal(number)
    done = real.finish(process)
    assert done.code == 128 + number
    assert "prefix cache: " in done.out and "[0..64)" in done.out
    assert done.err_lines[-1] == "1/4 requests were run"


def test_interrupted_while_loading_the_plan_is_shown(real: Program, tiny_model: Path) -> None:
    source = real.write_lines("in.jsonl", SCRIPT)
    process = real.start("inspect-cache", tiny_model, "run", "-i", source, *SMALL)
    real.interrupt_when(lambda: real.stderr_has("loading"), process, signal.SIGINT)
    done = real.finish(process)
    assert done.code == 130
    assert "state slots" in done.out and "prefix cache:" not in done.out


def test_sigusr1_writes_a_dump_of_the_running_engine(real: Program, tiny_model: Path) -> None:
    source = real.write_lines("in.jsonl", prompts(ids(1, 100), ids(1, 150), max_tokens=4_000))
    process = real.start(
        *("generate", tiny_model, "-i", source, "-o", "out.jsonl", "--cache-dump", "cache.json"),
        *SMALL,
    )
    dump = real.home / "cache.json"
    # While it loads, there is nothing to write yet, and nothing happens to the run.
    real.interrupt_when(lambda: real.stderr_has("loading"), process, signal.SIGUSR1)
    wait_for(dump.exists)
    dump.unlink()
    wait_for(lambda: real.stderr_has("generate 0/2"))
    real.interrupt_when(lambda: True, process, signal.SIGUSR1)
    wait_for(dump.exists)
    shown = real.run("inspect-cache", dump)
    assert shown.code == 0
    assert re.search(r"^state slots +2 +2 +\d", shown.out, re.M)
    assert re.search(r"hits \d  ref [12]", shown.out)
    assert process.poll() is None
    assert real.stderr_has("cache dump: cache.json")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        wait_for(lambda: real.stderr_has("Ctrl-C again") or process.poll() is not None)
    assert real.finish(process).code == 130
    final = json.loads(dump.read_text())
    assert final["hit"]["requests"] == 2, "written at the end, too"
    assert not list(real.home.glob(".cache.json*")), "whole or not at all"


def test_a_chat_is_dumped_at_the_prompt_and_at_the_end(tmp_path: Path) -> None:
    chat = Chat(tmp_path, "demo", [*REAL, "chat", "demo", "--max-tokens", "4"])
    dump = tmp_path / "cache.json"
    system = "You explain words with great care and without haste. " * 8
    with chat.open("--cache-dump", "cache.json", "--system", system, *SMALL) as terminal:
        terminal.ask("Define zebra.")
        terminal.signal(signal.SIGUSR1)
        terminal.wait_until(dump.exists, "the dump")
        terminal.watch(0.2)
        assert terminal.at_prompt, "and the prompt is as it was"
        first = json.loads(dump.read_text())
        assert (first["hit"]["requests"], first["hit"]["usable_tokens"]) == (1, 0)
        terminal.ask("Define harbor.")
        terminal.type(CTRL_D)
        assert terminal.wait_for_exit() == 0
    last = json.loads(dump.read_text())
    assert (last["source"], last["model"]["name"]) == ("chat", "demo")
    assert last["hit"]["requests"] == 2 and last["hit"]["usable_tokens"] >= 64


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("in.jsonl", "--cache-dump and --input are the same file"),
        ("out.jsonl", "--cache-dump and --output are the same file"),
        ("out.jsonl.partial", "--cache-dump is the journal of --output"),
        ("sum.json", "--cache-dump and --summary are the same file"),
        ("-", "--cache-dump -: stdout holds results only"),
        (".", "cannot write .: it is a directory"),
        ("no/where.json", "cannot write no/where.json: its directory does not exist"),
    ],
)
def test_a_dump_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    program: Program, fake_model: Path, path: str, error: str
) -> None:
    program.write_lines("in.jsonl", [{"prompt": "say a"}])
    done = program.run(
        *("generate", fake_model, "-i", "in.jsonl", "-o", "out.jsonl", "--summary", "sum.json"),
        *("--cache-dump", path),
    )
    assert (done.code, done.out) == (2, "")
    assert done.err_lines[-2] == f"error: {error}"
    assert program.engine_log == []


def test_a_dump_that_fails_at_the_end_costs_no_answer(real: Program, tiny_model: Path) -> None:
    source = real.write_lines("in.jsonl", prompts(ids(1, 20)))
    args = ["generate", tiny_model, "-i", source, "-o", "out.jsonl", *SMALL]
    done = real.run(*args, "--cache-dump", "/dev/full")
    assert done.code == 1
    assert "error: cannot write /dev/full: No space left on device" in done.err_lines
    assert [r["status"] for r in read_records(real.home / "out.jsonl")] == ["ok"]


def test_one_prompt_can_be_dumped_and_a_dry_run_cannot(real: Program, tiny_model: Path) -> None:
    args = ["generate", tiny_model, "--prompt", "x" * 100, "--cache-dump", "d.json", *SMALL]
    assert real.run(*args, "--max-tokens", "2", "-q").code == 0
    assert json.loads((real.home / "d.json").read_text())["nodes"][0]["end"] >= 64
    dry = real.run(*args, "--dry-run")
    assert dry.code == 2
    assert "error: --cache-dump has nothing to hold after a --dry-run" in dry.err


def test_where_no_line_can_be_run_there_is_the_plan_alone(real: Program, tiny_model: Path) -> None:
    source = real.write_lines("in.jsonl", ["no JSON"])
    done = real.run("inspect-cache", tiny_model, "run", "-i", source, *SMALL)
    assert done.code == 3
    assert "state slots" in done.out and "prefix cache:" not in done.out
    args = ["generate", tiny_model, "-i", source, "--cache-dump", "d.json", *SMALL]
    assert real.run(*args).code == 3
    assert real.run("inspect-cache", "d.json").out == done.out
