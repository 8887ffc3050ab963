"""`minivllm` where files cannot grow: past a limit of the system, or on a disk that is full.

full_disk_minivllm.py limit BYTES ARGS...    no file may become larger
full_disk_minivllm.py full COUNT ARGS...     after so many files the disk has no room
"""

import errno
import os
import resource
import sys

from minivllm_cli.main import main

_how, _number = sys.argv[1], int(sys.argv[2])
del sys.argv[1:3]
_fsync = os.fsync


def _full_fsync(descriptor: int) -> None:
    global _number
    _number -= 1
    if _number < 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    _fsync(descriptor)


if _how == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (_number, _number))
else:
    os.fsync = _full_fsync
main()
