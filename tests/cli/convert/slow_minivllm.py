"""`minivllm` on a disk that takes its time: every fsync waits a moment."""

import os
import time

from minivllm_cli.main import main

_fsync = os.fsync


def _slow_fsync(descriptor: int) -> None:
    time.sleep(0.05)
    _fsync(descriptor)


os.fsync = _slow_fsync
main()
