"""The entry point of the console script `minivllm` and of `python -m minivllm_cli`.

Nothing slow is imported before the signals are handled: a Ctrl-C in the first moments ends the program
with one line, not with a traceback out of an import.
"""

import os
import signal
import sys
from types import FrameType

from minivllm_cli.console import wants_json_events

_LEAVE_WITH = {signal.SIGINT: 130, signal.SIGTERM: 143}


def main() -> None:
    """Run the command line of this process, and end it."""
    for number in _LEAVE_WITH:
        signal.signal(number, _leave)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # asks a running engine for a dump; ends nothing
    from minivllm_cli.app import run_process

    code = run_process()
    if code in _LEAVE_WITH.values():
        # Not through the interpreter's end: where a library ran into the KeyboardInterrupt, Python would
        # end itself with SIGINT and forget the code.
        os._exit(code)
    for number in _LEAVE_WITH:  # all is done; what comes now changes nothing
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def _leave(number: int, frame: FrameType | None) -> None:
    # In force before a command begins and after it ended: there is nothing to clean up.
    text = "stopped while starting"
    if wants_json_events(sys.argv):
        text = f'{{"event":"log","level":"info","message":"{text}"}}'
    try:
        os.write(2, f"{text}\n".encode())
    finally:  # also when nobody reads it
        os._exit(_LEAVE_WITH[signal.Signals(number)])
