"""Ctrl-C and SIGTERM: the first one stops in good order and says how, the second one stops now."""

import os
import signal
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from minivllm_cli.console.streams import Console
from minivllm_cli.errors import ExitCode

CLEAN_UP_SECONDS = 10.0
_GRACE_SECONDS = 4.0


class Interrupts:
    """What a signal does now. Made once a process; a command says what it is doing.

    By default the first signal prints a line and raises KeyboardInterrupt in the main thread, and the
    second one ends the process. Inside `stopping_with` the first signal only calls back, inside
    `deferred` it only prints. SIGTERM does the same with exit code 143.

    Attributes:
        received: the first signal that came, if one did.
        activity: what is interrupted, for the message: "loading the model".
    """

    def __init__(self, console: Console) -> None:
        self.received: signal.Signals | None = None
        self.activity = "starting"
        self._console = console
        self._count = 0
        self._callback: Callable[[int], None] | None = None
        self._deferred = False
        self._watchdog: threading.Timer | None = None
        self._restore_echo: Callable[[], None] = lambda: None

    @property
    def exit_code(self) -> ExitCode:
        """The code to leave with, once a signal came."""
        if self.received == signal.SIGTERM:
            return ExitCode.TERMINATED
        return ExitCode.INTERRUPTED

    def check(self) -> None:
        """Stop now if a signal came. For after foreign code, which may swallow a KeyboardInterrupt.

        Raises:
            KeyboardInterrupt: one came.
        """
        if self.received is not None:
            raise KeyboardInterrupt

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM within. Restores what was there before."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._restore_echo = _hide_control_echo()
        old: dict[int, Any] = {
            s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)
        }
        # Means something only while an engine runs (`--cache-dump`), and must never end the program.
        old[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
            self._restore_echo()
            if self._watchdog is not None:
                self._watchdog.cancel()

    @contextmanager
    def stopping_with(self, callback: Callable[[int], None]) -> Iterator[None]:
        """Let a signal call `callback(count)` in the main thread within, and do nothing else.

        `count` is 1 for the first signal within this block. The callback must return quickly; it may
        raise KeyboardInterrupt to end what is going on.
        """
        before = (self._callback, self._count)
        self._callback, self._count = callback, 0
        try:
            yield
        finally:
            self._callback, self._count = before

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the first signal raise nothing within: `check` does, when it is called.

        For native code that aborts the process when an exception gets into it, as torch does while it
        loads. What takes too long is ended all the same.
        """
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def limit_clean_up(self, seconds: float = CLEAN_UP_SECONDS) -> None:
        """End the process after `seconds` and a grace, whatever it does."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._watchdog = threading.Timer(seconds + _GRACE_SECONDS, self._end_now)
        self._watchdog.daemon = True
        self._watchdog.start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
        self._count += 1
        if self._callback is not None:
            self._callback(self._count)
        elif self._count == 1:
            self._console.write_line(
                f"stopping while {self.activity}. Ctrl-C again to leave at once."
            )
            self.limit_clean_up(0)
            if not self._deferred:
                raise KeyboardInterrupt
        else:
            self._end_now()

    def _end_now(self) -> None:
        # The journal is flushed line by line: nothing is lost. Show the cursor that a bar may have hidden.
        if self._console.live:
            os.write(2, b"\x1b[?25h\n")
        self._restore_echo()
        os._exit(self.exit_code)


def _hide_control_echo() -> Callable[[], None]:
    """Keep a terminal from showing ^C within the line of an answer; what is returned undoes that."""
    try:
        before = termios.tcgetattr(2)
    except (OSError, termios.error):  # no terminal
        return lambda: None

    def change(attributes: list[Any]) -> None:
        # In the background, it would stop this process.
        with suppress(OSError, termios.error):
            if os.tcgetpgrp(2) == os.getpgrp():
                termios.tcsetattr(2, termios.TCSADRAIN, attributes)

    change([*before[:3], before[3] & ~termios.ECHOCTL, *before[4:]])
    return lambda: change(before)
