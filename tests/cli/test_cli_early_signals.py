"""A signal at any moment: the code says so, and there is one line instead of a traceback."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from cli.program import REAL, Program

# How the console script of an installation calls it.
_SCRIPT = [sys.executable, "-c", "import sys; from minivllm_cli.main import main; sys.exit(main())"]
_SLOW_IMPORT = "import time\nopen('importing', 'w').close()\ntime.sleep(30)\n"


@pytest.mark.parametrize(
    ("number", "code", "command"),
    [(signal.SIGINT, 130, _SCRIPT), (signal.SIGTERM, 143, REAL)],
    ids=["script", "-m"],
)
def test_while_the_program_itself_is_imported(
    program: Program, number: signal.Signals, code: int, command: list[str]
) -> None:
    (program.home / "typer.py").write_text(_SLOW_IMPORT)
    done = _interrupted(program, number, command, ["--help"])
    assert (done.returncode, done.stdout) == (code, b"")
    assert done.stderr == b"stopped while starting\n"


@pytest.mark.parametrize(
    ("number", "code", "swallowed"), [(signal.SIGINT, 130, True), (signal.SIGTERM, 143, False)]
)
def test_while_torch_is_imported(
    program: Program, number: signal.Signals, code: int, swallowed: bool
) -> None:
    text = _SLOW_IMPORT
    if swallowed:
        text = "\n".join(
            ["try:", *(f"    {line}" for line in text.splitlines()), "except BaseException: pass"]
        )
    (program.home / "torch.py").write_text(text)
    done = _interrupted(program, number, REAL, ["generate", "demo", "-p", "x"])
    assert (done.returncode, done.stdout) == (code, b"")
    assert b"stopping while loading the model" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_keyboard_interrupt_inside_a_library_does_not_change_the_code(program: Program) -> None:
    # Code that a library runs through PyRun_String: Python then means to end itself with SIGINT.
    (program.home / "torch.py").write_text(
        "import ctypes\n"
        "ctypes.pythonapi.PyRun_SimpleString"
        "(b\"import time; open('importing', 'w').close(); time.sleep(30)\")\n"
    )
    done = _interrupted(program, signal.SIGINT, REAL, ["generate", "demo", "-p", "x"])
    assert done.returncode == 130


def test_in_json_mode_it_is_an_event(program: Program) -> None:
    (program.home / "typer.py").write_text(_SLOW_IMPORT)
    args = ["generate", "-p", "x", "--progress", "json"]
    done = _interrupted(program, signal.SIGINT, REAL, args)
    assert done.stderr == b'{"event":"log","level":"info","message":"stopped while starting"}\n'


def _interrupted(
    program: Program, number: signal.Signals, command: list[str], args: list[str]
) -> "subprocess.CompletedProcess[bytes]":
    """Run with modules of `home` before the installed ones; a signal once one of them is imported."""
    environ = program.environ(PYTHONPATH=str(program.home))
    process = subprocess.Popen(
        [*command, *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=program.home,
        env=environ,
    )
    program.started.append(process)
    _wait(lambda: (program.home / "importing").exists() or process.poll() is not None)
    time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def _wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_is_imported_first_is_small() -> None:
    probe = (
        "import sys; before = set(sys.modules); import minivllm_cli.main\n"
        "print(sorted(m for m in set(sys.modules) - before if not m.startswith('_')))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert "typer" not in done.stdout
    assert "pydantic" not in done.stdout
