"""Terminal modes of a chat wherever it is not reading a line."""

import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def keys_held_back() -> Iterator[Callable[[], None]]:
    """Within, keys are not echoed into an answer; what is typed waits for the next prompt.

    Ctrl-C and Ctrl-Z keep their meaning. The old modes come back at the end, or when what is yielded
    is called.
    """
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    changed = termios.tcgetattr(descriptor)
    # Enter stays a carriage return: the prompt takes a newline for Ctrl-J. Ctrl-D stays a key.
    changed[0] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
    changed[3] &= ~(termios.ECHO | termios.ICANON)
    # Ctrl-C would have the terminal forget what was typed, and nobody could say how much that was.
    changed[3] |= termios.NOFLSH

    def hold(*_: object) -> None:
        termios.tcsetattr(descriptor, termios.TCSANOW, changed)

    def restore() -> None:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)

    hold()
    # A shell that we come back from after Ctrl-Z has left modes of its own.
    old_handler = signal.signal(signal.SIGCONT, hold)
    try:
        yield restore
    finally:
        signal.signal(signal.SIGCONT, old_handler)
        restore()
