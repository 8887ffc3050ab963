"""`generate --prompt`: the text and a newline, nothing else."""

import json
import os
import pty
import re
import signal
from pathlib import Path

import pytest

from cli.program import Program, read_records, wait_for


def test_the_text_and_a_newline(program: Program, fake_model: Path) -> None:
    done = program.run("generate", fake_model, "--prompt", "say Hello, world!")
    assert (done.code, done.stdout) == (0, b"Hello, world!\n")


def test_it_is_a_user_message_unless_raw(program: Program, fake_model: Path) -> None:
    program.run("generate", fake_model, "-p", "say x")
    program.run("generate", fake_model, "-p", "say x", "--raw")
    assert [entry["add"][0] for entry in program.added] == [257, ord("s")]
    assert program.added[0]["params"]["seed"] == 0


@pytest.mark.parametrize("args", [["--json"], ["--format", "jsonl"]])
def test_one_record_on_stdout(program: Program, fake_model: Path, args: list[str]) -> None:
    done = program.run("generate", fake_model, "-p", "say x", *args)
    (record,) = done.records
    assert (record["id"], record["line"], record["outputs"][0]["text"]) == ("prompt", None, "x")
    assert program.added[0]["add"][0] == 257


def test_one_record_in_a_file(program: Program, fake_model: Path) -> None:
    done = program.run("generate", fake_model, "-p", "say x", "-o", "out.jsonl")
    assert (done.code, done.out) == (0, "")
    assert read_records(program.home / "out.jsonl")[0]["outputs"][0]["text"] == "x"


def test_k7_reasoning_does_not_reach_stdout(program: Program, fake_model: Path) -> None:
    done = program.run("generate", fake_model, "-p", "think hm | yes", "--think")
    assert (done.code, done.out) == (0, "yes\n")


def test_k31_split_characters_come_whole(program: Program, fake_model: Path) -> None:
    done = program.run("generate", fake_model, "-p", "emoji", FAKE_TOKENS="1")
    assert done.out == "🙂🙃" * 3 + "\n"
    cut = program.run("generate", fake_model, "-p", "emoji", "--max-tokens", "7", FAKE_TOKENS="1")
    assert cut.out.startswith("🙂")
    assert "warning: stopped at max_tokens after 7 tokens" in cut.err_lines


def test_k31_an_interrupt_leaves_no_half_character(program: Program, fake_model: Path) -> None:
    process = program.start(
        "generate", fake_model, "-p", "emoji", FAKE_TOKENS="1", FAKE_STEP_SECONDS="0.05"
    )
    shown = program.home / "stdout"
    program.interrupt_when(lambda: shown.stat().st_size > 0, process, signal.SIGINT)
    done = program.finish(process)
    assert done.code == 130
    assert "\ufffd" not in done.out
    assert done.out.endswith("\n")
    assert "stopping while answering. Ctrl-C again to leave at once." in done.err


def test_failures_are_exit_3(program: Program, fake_model: Path) -> None:
    done = program.run("generate", fake_model, "-p", "x" * 99, "--max-model-len", "64")
    assert (done.code, done.out) == (3, "")
    assert "error: 118 prompt tokens + 1 > max_model_len 64" in done.err
    done = program.run("generate", fake_model, "-p", "nan")
    assert (done.code, done.out) == (3, "")
    assert "error: the logits are not finite" in done.err_lines


def test_control_characters_reach_pipes_but_no_terminal(program: Program, fake_model: Path) -> None:
    args = ["generate", fake_model, "-p", "controls", "-q"]
    assert program.run(*args).out == "a\x1b[2Jb\x07\x9bc\tend\n"
    screen = _on_terminal(program, args)
    assert screen == b"a[2Jbc\tend\r\n"


def test_k20_a_long_prompt_shows_a_rising_percentage(program: Program, fake_model: Path) -> None:
    text = "x" * 12_000 + "\nsay done"
    args = ["generate", fake_model, "-p", text, "--max-model-len", "16K"]
    screen = _on_terminal(
        program, args, stderr_too=True, FAKE_STEP_SECONDS="0.06", TERM="xterm", COLUMNS="120"
    ).decode()
    seen = [int(percent) for percent in re.findall(r"prompt \S+ [\d,]+/12,\d+ \((\d+)%\)", screen)]
    assert len(set(seen)) > 5
    assert seen == sorted(seen)


def test_the_default_model_is_named(program: Program, fake_model: Path) -> None:
    done = program.run("generate", "-p", "x")
    assert done.err_lines[0] == "model: demo (built in; give MODEL or set model: in the config)"
    (program.home / "c.yaml").write_text(json.dumps({"model": str(fake_model)}))
    done = program.run("generate", "-p", "say x", "--config", "c.yaml")
    assert (done.code, done.out) == (0, "x\n")
    assert "model:" not in done.err


def _on_terminal(
    program: Program, args: list[str | Path], *, stderr_too: bool = False, **env: str
) -> bytes:
    """What a terminal that is the program's stdout (and stderr) gets."""
    parent, child = pty.openpty()
    import subprocess

    process = subprocess.Popen(
        [*program.command, *map(str, args)],
        stdin=subprocess.DEVNULL,
        stdout=child,
        stderr=child if stderr_too else subprocess.DEVNULL,
        cwd=program.home,
        env=program.environ(**env),
    )
    os.close(child)
    chunks = []
    try:
        while chunk := os.read(parent, 65536):
            chunks.append(chunk)
    except OSError:  # how a pty says that the other end is closed
        wait_for(lambda: process.poll() is not None)
    os.close(parent)
    assert process.wait(10) == 0
    return b"".join(chunks)
