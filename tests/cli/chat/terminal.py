"""A terminal for tests: a program in a pseudo-terminal, and what a person would see of it."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyte

PASTE_BEGIN, PASTE_END = "\x1b[200~", "\x1b[201~"
ENTER, CTRL_C, CTRL_D, CTRL_J, ALT_ENTER, TAB, UP = (
    "\r",
    "\x03",
    "\x04",
    "\n",
    "\x1b\r",
    "\t",
    "\x1b[A",
)


class Terminal:
    """Runs `argv`. Everything waits with a deadline and fails with the screen's content."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        *,
        rows: int = 24,
        columns: int = 100,
    ) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=10_000)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.descriptor, slave = pty.openpty()
        self._set_size(rows, columns)
        # The wrapper takes the terminal over: between fork and exec it would be unsafe in a
        # process with threads.
        wrapper = Path(__file__).with_name("on_terminal.py")
        self.process = subprocess.Popen(
            [sys.executable, str(wrapper), *argv],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )
        os.close(slave)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.descriptor)

    @property
    def lines(self) -> list[str]:
        """What was scrolled away and what is on screen, without blanks at line ends."""
        columns = range(self.screen.columns)
        top = ["".join(row[x].data for x in columns) for row in self.screen.history.top]
        return [line.rstrip() for line in [*top, *self.screen.display]]

    @property
    def text(self) -> str:
        return "\n".join(self.lines).rstrip()

    @property
    def cursor_line(self) -> str:
        return str(self.screen.display[self.screen.cursor.y]).rstrip()

    @property
    def at_prompt(self) -> bool:
        return self.cursor_line == ">" and self.screen.cursor.x == 2

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def wait_for(self, text: str, seconds: float = 60) -> None:
        self._wait(lambda: text in self.text, f"{text!r} to appear", seconds)

    def wait_until(self, condition: Callable[[], object], what: str, seconds: float = 60) -> None:
        self._wait(condition, what, seconds)

    def wait_for_prompt(self, seconds: float = 60) -> None:
        """Wait until an empty prompt is what the screen ends with."""
        self._wait(lambda: self.at_prompt, "the prompt", seconds)

    def ask(self, text: str) -> str:
        """Type a line at the prompt and wait for the next prompt; what was shown below the line."""
        self.wait_for_prompt()
        before = len(self.text)
        self.type(text)
        self._wait(lambda: not self.at_prompt, "the typed text", 60)
        self.type(ENTER)
        self._wait(lambda: self.at_prompt and len(self.text) > before + 1, "the next prompt", 60)
        return self.text[before:].partition("\n")[2].removesuffix(">").strip("\n")

    def watch(self, seconds: float) -> None:
        """Take in what comes for a while."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._pump(0.02)

    def resize(self, rows: int, columns: int) -> None:
        self._set_size(rows, columns)
        self.screen.resize(rows, columns)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def wait_for_exit(self, seconds: float = 60) -> int:
        """The exit code; negative for a signal."""
        until = time.monotonic() + seconds
        while self._pump(0.05):
            assert time.monotonic() < until, f"still running:\n{self.text}"
        return self.process.wait(max(until - time.monotonic(), 1))

    def _wait(self, condition: Callable[[], object], what: str, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not condition():
            alive = self._pump(0.02)
            assert alive or condition(), f"ended while waiting for {what}:\n{self.text}"
            assert time.monotonic() < until, f"waited {seconds} s for {what}:\n{self.text}"

    def _pump(self, seconds: float) -> bool:
        """Take in what has come; False once the program is gone."""
        if not select.select([self.descriptor], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.descriptor, 65536)
        except OSError:  # Linux says so when the last one with the terminal open is gone
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)

    def _set_size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
