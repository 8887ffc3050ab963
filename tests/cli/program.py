"""The program as tests run it: a process of its own, both streams apart, a clean environment."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import minivllm_cli
from minivllm_cli import app
from support.loggers import loggers_as_they_were

TESTS = Path(__file__).resolve().parents[1]
SRC = Path(minivllm_cli.__file__).resolve().parents[1]  # the one under test, whatever is installed
FAKE = [sys.executable, str(Path(__file__).with_name("fake_minivllm.py"))]
REAL = [sys.executable, "-m", "minivllm_cli"]


@dataclass(frozen=True)
class Finished:
    """What a run left: its streams as bytes, and the exit code."""

    code: int
    stdout: bytes
    stderr: bytes

    @property
    def out(self) -> str:
        return self.stdout.decode()

    @property
    def err(self) -> str:
        return self.stderr.decode()

    @property
    def err_lines(self) -> list[str]:
        return self.err.splitlines()

    @property
    def records(self) -> list[dict[str, Any]]:
        return [parse_strictly(line) for line in self.out.split("\n")[:-1]]


@dataclass
class Program:
    """`minivllm` in a directory of its own, with the fake engine unless said otherwise."""

    home: Path
    command: list[str] = field(default_factory=lambda: list(FAKE))
    env: dict[str, str] = field(default_factory=dict)
    started: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def environ(self, **extra: str) -> dict[str, str]:
        keep = {key: os.environ[key] for key in ("PATH", "LANG", "LC_ALL") if key in os.environ}
        return {
            **keep,
            "HOME": str(self.home),
            "XDG_STATE_HOME": str(self.home / "state"),
            "XDG_CONFIG_HOME": str(self.home / "config"),
            "TERM": "dumb",
            "COLUMNS": "80",
            # Small matrices: threads that wait for each other cost more than they do.
            "OMP_NUM_THREADS": "1",
            "FAKE_LOG": str(self.home / "engine.log"),
            **self.env,
            **extra,
            "PYTHONPATH": os.pathsep.join(
                [*extra.get("PYTHONPATH", "").split(), str(TESTS), str(SRC)]
            ),
        }

    def run(
        self, *args: str | Path, stdin: bytes | None = b"", timeout: float = 120, **extra: str
    ) -> Finished:
        """Run to the end."""
        done = subprocess.run(
            [*self.command, *map(str, args)],
            input=stdin,
            capture_output=True,
            cwd=self.home,
            env=self.environ(**extra),
            timeout=timeout,
            check=False,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    def run_here(self, *args: str | Path, stdin: bytes = b"", **extra: str) -> Finished:
        """Run the real program to the end in this process, where no process is the subject."""
        out, err = io.BytesIO(), io.BytesIO()
        streams = [
            mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin))),
            mock.patch("sys.stdout", io.TextIOWrapper(out, write_through=True)),
            mock.patch("sys.stderr", io.TextIOWrapper(err, write_through=True)),
            mock.patch.dict(os.environ, self.environ(**extra), clear=True),
        ]
        with contextlib.ExitStack() as stack:
            stack.enter_context(loggers_as_they_were())
            for patch in streams:
                stack.enter_context(patch)
            stack.enter_context(contextlib.chdir(self.home))
            code = app.run([str(arg) for arg in args])
            return Finished(code, out.getvalue(), err.getvalue())

    def start(self, *args: str | Path, **extra: str) -> "subprocess.Popen[bytes]":
        """Start in the background; stdout and stderr go to `stdout` and `stderr` in `home`."""
        with open(self.home / "stdout", "wb") as out, open(self.home / "stderr", "wb") as err:
            process = subprocess.Popen(
                [*self.command, *map(str, args)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self.home,
                env=self.environ(**extra),
            )
        self.started.append(process)
        return process

    def end_all(self) -> None:
        """Leave nothing running behind a test that failed."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()

    def finish(self, process: "subprocess.Popen[bytes]", timeout: float = 60) -> Finished:
        """Wait for a started run."""
        code = process.wait(timeout)
        return Finished(
            code, (self.home / "stdout").read_bytes(), (self.home / "stderr").read_bytes()
        )

    def interrupt_when(
        self, condition: Callable[[], bool], process: "subprocess.Popen[bytes]", number: int
    ) -> None:
        """Send a signal as soon as `condition` holds."""
        wait_for(condition)
        assert process.poll() is None, (self.home / "stderr").read_text()
        process.send_signal(signal.Signals(number))

    def stderr_has(self, text: str) -> bool:
        return text in (self.home / "stderr").read_text()

    @property
    def engine_log(self) -> list[dict[str, Any]]:
        path = self.home / "engine.log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def added(self) -> list[dict[str, Any]]:
        """The requests that the fake engine got."""
        return [entry for entry in self.engine_log if "add" in entry]

    def forget_engine(self) -> None:
        (self.home / "engine.log").unlink(missing_ok=True)

    def write_lines(self, name: str, lines: list[Any]) -> Path:
        """An input file; dictionaries become JSON."""
        path = self.home / name
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("".join(text + "\n" for text in texts))
        return path


def parse_strictly(line: str) -> dict[str, Any]:
    """A record as a strict parser reads it: no NaN, no infinity, an object."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} in {line}")

    value = json.loads(line, parse_constant=refuse)
    assert isinstance(value, dict)
    return value


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a published file."""
    return [parse_strictly(line) for line in path.read_text().split("\n")[:-1]]


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until `condition` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def is_idle(pid: int, handles: signal.Signals) -> bool:
    """Has a process a handler for that signal, and nothing to do? Looks for half a second."""
    if not Path("/proc").exists():
        time.sleep(3)
        return True

    def spent() -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    if not int(caught, 16) >> (handles - 1) & 1:
        return False
    before = spent()
    time.sleep(0.5)
    return spent() == before
