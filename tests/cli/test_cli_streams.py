"""stdout holds results and nothing else; stderr the rest, without escapes where nobody watches."""

import io
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from cli.chat.terminal import CTRL_C, Terminal
from cli.program import Program, parse_strictly, wait_for
from minivllm_cli.console.streams import Console


@pytest.fixture
def source(program: Program) -> Path:
    return program.write_lines(
        "in", [{"prompt": "say a"}, {"prompt": "noise"}, {"prompt": "say b"}]
    )


def test_k3_noise_on_descriptor_1_goes_to_stderr(
    program: Program, fake_model: Path, source: Path
) -> None:
    done = program.run("generate", fake_model, "-i", source, "-o", "-")
    assert [r["outputs"][0]["text"] for r in done.records] == ["a", "quiet", "b"]
    assert "noise" in done.err_lines
    done = program.run("generate", fake_model, "-p", "noise")
    assert done.stdout == b"quiet\n"


@pytest.mark.parametrize("force", [{}, {"FORCE_COLOR": "1", "TERM": "xterm-256color"}])
def test_k4_no_escapes_in_files(
    program: Program, fake_model: Path, source: Path, force: dict[str, str]
) -> None:
    done = program.run("generate", fake_model, "-i", source, "-o", "-", **force)
    assert b"\x1b" not in done.stdout
    escapes = [part.split("m")[0] for part in done.err.split("\x1b[")[1:]]
    if not force:
        assert "\x1b" not in done.err
    assert all(escape.replace(";", "").isdigit() for escape in escapes), "colours only"


def test_k4_no_color_beats_force_color(program: Program, fake_model: Path, source: Path) -> None:
    args = ["generate", fake_model, "-i", source, "-i", "none"]
    assert "\x1b[" in program.run(*args, FORCE_COLOR="1").err
    assert "\x1b" not in program.run(*args, FORCE_COLOR="1", NO_COLOR="1").err


def test_k4_a_long_run_writes_little(program: Program, fake_model: Path) -> None:
    source = program.write_lines("in", [{"prompt": f"count {n}"} for n in range(300)])
    done = program.run("generate", fake_model, "-i", source, "-o", "out")
    assert done.code == 0
    assert len(done.stderr) < 4096


def test_k35_an_idle_pipe_on_stdin_is_left_alone(program: Program, fake_model: Path) -> None:
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            [*program.command, "generate", str(fake_model), "-p", "say x"],
            stdin=reader,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=program.environ(),
        )
        out, _ = process.communicate(timeout=60)
    finally:
        os.close(reader)
        os.close(writer)
    assert (process.returncode, out) == (0, b"x\n")


def test_k37_a_reader_that_leaves_stops_the_engine(program: Program, fake_model: Path) -> None:
    source = program.write_lines("in", [{"prompt": f"say {n}"} for n in range(2000)])
    process = subprocess.Popen(
        [*program.command, "generate", str(fake_model), "-i", str(source), "--max-num-seqs", "2"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=program.environ(),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    first = process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 141
    err = process.stderr.read().decode()
    process.stderr.close()
    assert parse_strictly(first.decode())["index"] == 0
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
    assert err.strip()
    assert program.engine_log[-1] == {"closed": True}
    assert len(program.added) < 2000


@pytest.mark.parametrize("what", ["generate --help", "generate --print-config", "env"])
def test_k37_help_and_tables_into_a_closed_pipe(
    program: Program, fake_model: Path, what: str
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen(
        [*program.command, *what.split()],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=program.environ(MINIVLLM_MODEL=str(fake_model)),
    )
    os.close(writer)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 141
    assert b"Traceback" not in err


def test_a_full_disk_is_exit_1(program: Program, fake_model: Path, source: Path) -> None:
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen(
            [*program.command, "generate", str(fake_model), "-i", str(source)],
            stdout=full,
            stderr=subprocess.PIPE,
            env=program.environ(),
        )
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"error: cannot write results to stdout: No space left on device\n" in err


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_descriptor_that_was_closed_by_the_caller(
    program: Program, fake_model: Path, source: Path, closed: int
) -> None:
    command = " ".join([*program.command, f"generate {fake_model} -i {source} -o out {closed}>&-"])
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=program.home,
        env=program.environ(),
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"")
    assert len((program.home / "out").read_text().splitlines()) == 3


def test_without_any_stdout_results_have_nowhere_to_go(
    program: Program, fake_model: Path, source: Path
) -> None:
    command = " ".join([*program.command, f"generate {fake_model} -i {source} >&-"])
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=program.home,
        env=program.environ(),
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    assert done.returncode == 141
    assert program.engine_log == []


def test_verbose_shows_the_engines_log(program: Program, fake_model: Path) -> None:
    script = (
        "import logging\n"
        "from minivllm_cli.console.streams import Console\n"
        "from minivllm_cli.console.logging import route_logging\n"
        "import sys\n"
        "route_logging(Console(quiet='-q' in sys.argv, verbosity=sys.argv.count('-v')))\n"
        "log = logging.getLogger('minivllm_engine.part')\n"
        "log.debug('d'); log.info('i'); log.warning('w'); log.warning('w'); log.error('e')\n"
    )
    import sys

    def shown(*flags: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", script, *flags], capture_output=True, env=program.environ()
        )
        assert done.stdout == b""
        return done.stderr.decode().splitlines()

    assert shown() == ["warning: w", "error: e"]
    assert shown("-q") == ["error: e"]
    assert shown("-v") == ["minivllm_engine.part: i", "warning: w", "error: e"]
    assert re.fullmatch(r" +[0-9]+\.[0-9]{3} s minivllm_engine.part: d", shown("-v", "-v")[0])


def test_vv_shows_more_than_v(program: Program) -> None:
    once, twice = (
        program.run_here("generate", "-p", "x", "--max-tokens", "2", v).err for v in ("-v", "-vv")
    )
    assert "begins: weights" in twice and "step of 1 sequences" in twice
    assert "begins" not in once and "step of" not in once


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["bench", "--help-metrics"], ""),
        (["generate", "--print-config", "--set", "chat.system=caf\u00e9"], "system: caf?"),
        (["generate", "-p", "x", "--config", "caf\u00e9"], "cannot read config caf?"),
        (["caf\u00e9"], "no such command 'caf?'"),
        (["generate", "--", "caf\u00e9", "caf\u00e9"], "unexpected extra argument(s) (caf?)"),
    ],
)
def test_b7_characters_that_a_stream_cannot_show_are_replaced(
    program: Program, args: list[str], shown: str
) -> None:
    done = program.run(*args, PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    text = (done.stdout + done.stderr).decode("ascii")
    assert shown in text
    assert "Error" not in text


def test_an_interrupted_answer_leaves_no_residue_on_the_terminal(
    program: Program, fake_model: Path
) -> None:
    argv = [*program.command, "generate", str(fake_model), "-p", "forever"]
    env = program.environ(TERM="xterm", FAKE_STEP_SECONDS="0.05")
    with Terminal(argv, env, program.home) as terminal:
        terminal.wait_until(lambda: program.engine_log and terminal.text.strip(), "an answer")
        terminal.type(CTRL_C)
        assert terminal.wait_for_exit() == 130
        answer, message, *rest = [line for line in terminal.lines if "model:" not in line]
        assert b"^C" not in terminal.raw
        assert answer and "stopping" not in answer
        assert message == "stopping while answering. Ctrl-C again to leave at once."
        assert not any(rest)


def test_lines_are_broken_between_words_on_a_terminal(program: Program, fake_model: Path) -> None:
    name = "/".join(["a directory of some length"] * 3)
    argv = [*program.command, "generate", name, "-p", "x"]
    with Terminal(argv, program.environ(TERM="xterm"), program.home, columns=40) as terminal:
        assert terminal.wait_for_exit() == 2
        lines = terminal.lines
    assert lines[0].endswith(("a", "of", "directory", "some"))
    assert "".join(f"{line} " for line in lines[:4]).startswith(f"error: model {name!r} is not a")


def test_records_are_released_while_the_run_goes_on(program: Program, fake_model: Path) -> None:
    source = program.write_lines("in", [{"prompt": "say a"}, {"prompt": "forever"}])
    process = program.start("generate", fake_model, "-i", source, FAKE_STEP_SECONDS="0.02")
    shown = program.home / "stdout"
    wait_for(lambda: shown.stat().st_size > 0)
    assert process.poll() is None
    process.kill()
    process.wait()
    assert parse_strictly(shown.read_text().splitlines()[0])["id"] == "line-000001"


def test_what_users_wrote_cannot_command_the_terminal(program: Program, fake_model: Path) -> None:
    hostile = {"id": "x\x1b[2J\x9b", "prompt": "controls", "\x1b[31mkey": "\u2028"}
    bad = '{"a\\u001b[2J": 1, "a\\u001b[2J": 2}'
    source = program.write_lines("in", [hostile, bad])
    done = program.run("generate", fake_model, "-i", source)
    assert done.code == 3
    for raw in (b"\x1b", b"\x9b", "\x9b".encode(), "\u2028".encode()):
        assert raw not in done.stdout + done.stderr
    assert done.records[0]["id"] == hostile["id"]
    assert done.records[0]["outputs"][0]["text"] == "a\x1b[2Jb\x07\x9bc\tend"


def test_it_runs_inside_a_test_runner_too(program: Program, fake_model: Path) -> None:
    from typer.testing import CliRunner

    from minivllm_cli.app import app

    runner = CliRunner()
    done = runner.invoke(app, ["generate", str(fake_model), "--print-config", "--diff-defaults"])
    assert done.exit_code == 0
    assert done.stdout.startswith(f"model: {fake_model}\n")
    done = runner.invoke(app, ["generate", str(fake_model), "-p", "x", "-i", "y"])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: --prompt and --input exclude each other\n")


def test_a_slow_reader_gets_every_byte(program: Program, fake_model: Path) -> None:
    # Records larger than a pipe holds, into a pipe that was made non-blocking by its other user.
    text = "x" * 200_000
    source = program.write_lines("in", [{"prompt": "say a", "note": text} for _ in range(3)])
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    process = subprocess.Popen(
        [*program.command, "generate", str(fake_model), "-i", str(source)],
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=subprocess.DEVNULL,
        env=program.environ(),
    )
    os.close(writer)
    time.sleep(1)
    with open(reader, "rb") as file:
        records = [parse_strictly(line.decode()) for line in file]
    assert process.wait(60) == 0
    assert [r["meta"]["note"] for r in records] == [text] * 3


def test_a_signal_may_speak_while_stderr_is_written_to(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(io.RawIOBase):
        """As if a signal's handler ran in the middle of the first write."""

        calls = 0

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.calls += 1
            if self.calls == 1:
                console.write_line("stopping")
            return os.write(2, data)

    stream = io.TextIOWrapper(io.BufferedWriter(Interrupted()), write_through=True)
    monkeypatch.setattr("sys.stderr", stream)
    console = Console()
    console.write_line("generate 1/2")
    console.write_line("after")
    assert capfd.readouterr().err == "stopping\ngenerate 1/2\nafter\n"
