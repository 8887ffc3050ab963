"""Signals whose handlers may raise, as Ctrl-C does: they wait while the engine's books are being changed."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

# Those that people let raise: Ctrl-C, a request to end, a timeout.
_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name)
)


class DeferredSignals:
    """Within `with held:`, handlers that somebody has set in Python run late: where `release` lets them.

    An exception out of a handler can come between any two instructions. Between those that move a block from
    one list to another it would lose the block, and between those that restore a state and say so it would
    leave a wrong answer. So they run before the engine computes, while it does, which can be undone, and
    once all is in order. Only the main thread runs handlers: in others this does nothing. May be nested.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._held = False
        self._came: list[tuple[int, FrameType | None]] = []
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            if self._depth == 0:
                self._install()
            # From here on no handler can raise.
            self._depth += 1
            self._held = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._depth and threading.current_thread() is threading.main_thread():
            self._depth -= 1
            if self._depth == 0:
                self._restore()

    def release(self) -> None:
        """Let handlers run as their signals come, those that were held first, until `hold`."""
        self._held = False
        while self._came:
            number, frame = self._came.pop(0)
            self._handlers[number](number, frame)

    def hold(self) -> None:
        """End what `release` began."""
        self._held = self._depth > 0

    def _install(self) -> None:
        self._held = True
        self._came.clear()
        try:
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                # Ours is still there where a handler raised while the last one was taken away.
                if callable(handler) and handler != self._on_signal:
                    self._handlers[number] = handler
                    signal.signal(number, self._on_signal)
        except BaseException:
            self._restore()
            raise

    def _restore(self) -> None:
        try:
            for number, handler in self._handlers.items():
                # Not where a handler has set another one meanwhile.
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, handler)
        finally:
            self.release()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            self._came.append((number, frame))
        else:
            self._handlers[number](number, frame)
