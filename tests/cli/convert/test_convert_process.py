"""`convert-weights` as a process: what it loads, its streams, signals, and a run that goes on."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.chat.terminal import ENTER, Terminal
from cli.convert.conftest import Run
from cli.program import Finished, Program
from support.tiny_checkpoint import random_tensors, tiny_config, write_checkpoint

_PROBE = (
    "import sys; sys.argv = ['minivllm', *sys.argv[1:]]\n"
    "from minivllm_cli.app import run\n"
    "code = run(sys.argv[1:])\n"
    "heavy = {'torch', 'transformers', 'numpy', 'prompt_toolkit'}\n"
    "print(sorted(heavy & set(sys.modules)), code, file=sys.stderr)\n"
)
_MANY_SHARDS = ("--max-shard-size", "120kB")


def partial_shards(program: Program) -> list[str]:
    return sorted(file.name for file in program.home.glob("dst.partial/model-*.safetensors"))


def contents(path: Path) -> dict[str, bytes]:
    return {
        file.name: file.read_bytes()
        for file in path.iterdir()
        if file.name != "minivllm_manifest.json"  # it has the arguments
    }


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["src", "dst", "--dry-run"], 0),
        (["src", "--dry-run", "--json"], 0),
        (["src", "--explain", "model.norm.weight"], 0),
        (["src", "--explain", "model.nrm.weight"], 2),
        (["bad", "dst", "--dry-run"], 5),
        (["bad", "dst"], 5),
        (["none", "dst"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_headers_tell_needs_no_torch(
    real: Program, src: Path, args: list[str], code: int
) -> None:
    bad = real.home / "bad"
    bad.mkdir()
    (bad / "config.json").write_bytes((src / "config.json").read_bytes())
    (bad / "model.safetensors").write_bytes((src / "model-00001-of-00002.safetensors").read_bytes())
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE, "convert-weights", *args],
        capture_output=True,
        text=True,
        env=real.environ(),
        cwd=real.home,
    )
    assert probe.stderr.splitlines()[-1] == f"[] {code}"
    assert not (real.home / "dst").exists()


def test_streams_and_codes_of_a_conversion(real: Program, here: Run, src: Path) -> None:
    done = real.run("convert-weights", "src", "dst", *_MANY_SHARDS)
    assert (done.code, done.stdout) == (0, b"dst\n")
    assert b"\x1b" not in done.stderr
    assert len(done.stderr) < 4096
    assert any(line.startswith("write shard 1/") for line in done.err_lines)
    done = here("src", "quiet", "-q")
    assert (done.code, done.stdout, done.stderr) == (0, b"quiet\n", b"")


def test_progress_as_json_is_json_on_every_line(real: Program, src: Path) -> None:
    done = real.run("convert-weights", "src", "dst", "--progress", "json", "--verify", "full")
    assert done.code == 0
    events = [json.loads(line) for line in done.err_lines]
    progress = [event for event in events if event["event"] == "progress"]
    assert progress[0]["phase"] == "loading"  # torch takes its time
    phases = {event["phase"] for event in progress[1:]}
    assert {"write", "verify"} <= phases
    for phase in phases:
        last = [event for event in progress if event["phase"] == phase][-1]
        assert last["done"] == last["total"] > 0
        assert last["detail"].startswith("shard ") and last["bytes_s"] >= 0
    done = real.run("convert-weights", "src", "dst", "--progress", "json")
    (event,) = [json.loads(line) for line in done.err_lines if '"error"' in line]
    assert (done.code, event["event"]) == (2, "error")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_k26_a_signal_leaves_a_partial_that_resume_finishes(
    slow: Program, here: Run, src: Path, number: signal.Signals, code: int
) -> None:
    done = _stopped(slow, number)
    assert (done.code, done.stdout) == (code, b"")
    assert b"stopping while converting" in done.stderr
    assert b"dst.partial is kept: --resume goes on with it" in done.stderr
    assert b"Traceback" not in done.stderr
    _resume_and_compare(slow, here)


def test_k26_a_kill_leaves_a_partial_that_resume_finishes(
    slow: Program, here: Run, src: Path
) -> None:
    assert _stopped(slow, signal.SIGKILL).code == -signal.SIGKILL
    _resume_and_compare(slow, here)


def _stopped(slow: Program, number: signal.Signals) -> Finished:
    """A conversion that got a signal when three shards of several were there."""
    process = slow.start("convert-weights", "src", "dst", *_MANY_SHARDS)
    slow.interrupt_when(lambda: len(partial_shards(slow)) >= 3, process, number)
    done = slow.finish(process)
    assert not (slow.home / "dst").exists()
    return done


def _resume_and_compare(program: Program, here: Run) -> None:
    partial = program.home / "dst.partial"
    times = {name: (partial / name).stat().st_mtime_ns for name in partial_shards(program)}
    refused = here("src", "dst", *_MANY_SHARDS)
    assert refused.code == 2
    assert "--resume" in refused.err_lines[-1]
    done = here("src", "dst", *_MANY_SHARDS, "--resume")
    assert (done.code, done.out) == (0, "dst\n"), done.err
    assert not partial.exists()
    # The last one may have been stopped between its rename and the note of its hash.
    kept = [
        name
        for name, time in times.items()
        if (program.home / "dst" / name).stat().st_mtime_ns == time
    ]
    assert len(kept) >= len(times) - 1 >= 2
    assert f"({len(kept)} from an earlier run)" in done.err
    assert here("src", "whole", *_MANY_SHARDS).code == 0
    assert contents(program.home / "dst") == contents(program.home / "whole")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as Linux counts it")
def test_k26_memory_does_not_grow_with_the_source(real: Program) -> None:
    config = tiny_config(hidden_size=512, intermediate_size=8192)
    source = write_checkpoint(real.home / "big", config, random_tensors(config))
    size = (source / "model.safetensors").stat().st_size
    real.command = [sys.executable, str(Path(__file__).with_name("measured_minivllm.py"))]
    done = real.run("convert-weights", "big", "dst", "--max-shard-size", "20MB", "--verify", "full")
    assert done.code == 0
    assert len(list(real.home.glob("dst/model-*.safetensors"))) > 8
    grown = int(done.err_lines[-1])
    # Two shards, and what torch itself takes at the first operations and for its buffers.
    assert grown < 2 * 20e6 + 80e6 < 0.6 * size


def test_a_closed_stdout_is_told_by_the_code_and_dst_is_there(real: Program, src: Path) -> None:
    process = subprocess.Popen(
        [*real.command, "convert-weights", "src", "dst"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=real.home,
        env=real.environ(),
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141
    assert b"Traceback" not in error
    assert (real.home / "dst" / "minivllm_manifest.json").exists()


def test_overwriting_asks_on_a_terminal(real: Program, here: Run, src: Path) -> None:
    assert here("src", "dst").code == 0
    argv = [*real.command, "convert-weights", "src", "dst", "--overwrite", "--dtype", "bf16"]
    env = real.environ(TERM="xterm-256color")
    for answer, code in (("n", 2), ("y", 0)):
        with Terminal(argv, env, real.home, columns=80) as terminal:
            terminal.wait_for("[y/N]")
            assert "replace dst (" in " ".join(terminal.text.split())
            terminal.type(answer + ENTER)
            assert terminal.wait_for_exit() == code
        manifest = json.loads((real.home / "dst" / "minivllm_manifest.json").read_text())
        assert manifest["dtype"] == ("bf16" if answer == "y" else "keep")
    assert not list(real.home.glob("dst?*"))


def test_k40_the_table_fits_the_terminal(real: Program, src: Path) -> None:
    argv = [*real.command, "convert-weights", "src", "--dry-run"]  # free space would vary
    env = real.environ(TERM="xterm-256color")
    del env["COLUMNS"]
    with Terminal(argv, env, real.home, columns=120, rows=70) as terminal:
        assert terminal.wait_for_exit() == 0
        lines = terminal.lines
    piped = real.run("convert-weights", "src", "--dry-run").out
    # A line that ran over the edge would have left a word in two parts.
    assert set(piped.split()) <= set(" ".join(lines).split())


def test_generate_takes_what_came_out(real: Program, here: Run, src: Path) -> None:
    assert here("src", "dst").code == 0
    args = ("-p", "hi", "--max-tokens", "4", "--temperature", "0", "--json")
    done = real.run("generate", "dst", *args)
    assert done.code == 0
    assert done.records[0]["usage"]["completion_tokens"] == 4
