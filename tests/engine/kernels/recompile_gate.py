"""Compiles what the steps of a small model launch, and prints which steps needed a kernel anew.

Run as a program, without TRITON_INTERPRET: `python recompile_gate.py`. Kernels compute nothing. Prints one
JSON object a step: the names of its kernels, and of those that no earlier step had compiled.
"""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from triton.runtime import driver

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from compile_gate import NoDriver, compile_only, let_kernels_start_early  # noqa: E402

from minivllm_engine.ops.kernel_backend import kernel_operations  # noqa: E402
from support.packed_runner import PackedRunner, load_model  # noqa: E402
from support.tiny_checkpoint import write_tiny_checkpoint  # noqa: E402


def main() -> None:
    torch.manual_seed(0)
    compiled: list[SimpleNamespace] = []
    compile_only(compiled)
    driver.set_active(NoDriver(90))
    let_kernels_start_early(True)
    with tempfile.TemporaryDirectory() as directory:
        kernels = kernel_operations(chunks="reference")
        model = load_model(write_tiny_checkpoint(Path(directory)), operations=kernels)
    runner = PackedRunner(model)
    # In blocks of 16 tokens, so that block tables are 1, 4 and 16 wide.
    rows = [runner.add([1] * length) for length in (60, 60, 60, 60, 60, 250, 9)]
    known: set[int] = set()
    for counts in (
        {0: 1},
        {1: 17},
        # Products of two rows are kernels of their own, as those of one.
        {0: 1, 1: 1},
        # From here on nothing is new: other numbers of sequences, tokens, blocks, tiles, and cuts.
        {0: 1, 2: 3},
        {0: 1, 1: 1, 2: 1, 3: 16, 4: 33},
        {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 7},
        {5: 40, 4: 2},
        {3: 17},
        {5: 1, 4: 1},
        {0: 1, 4: 1, 5: 2},
        {6: 1},
        {6: 8},
    ):
        compiled.clear()
        runner.step(*((rows[row], count) for row, count in counts.items()))
        names = sorted({entry.name for entry in compiled})
        new = sorted({entry.name for entry in compiled if id(entry.kernel) not in known})
        known |= {id(entry.kernel) for entry in compiled}
        print(json.dumps({"kernels": names, "new": new}))


if __name__ == "__main__":
    main()
