"""`minivllm`; the last line of stderr says by how many bytes memory grew after its libraries were loaded."""

import resource
import sys

import torch

from minivllm_cli.app import run
from minivllm_engine.conversion import convert

assert torch and convert  # loaded before the first measurement


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


before = peak()
code = run(sys.argv[1:])
print(peak() - before, file=sys.stderr)
sys.exit(code)
