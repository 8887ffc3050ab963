"""SIGKILL at any moment, and a second run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import kill_at_every_step
from support.converted import convert_to
from support.tiny_checkpoint import random_tensors, tiny_config, write_checkpoint

CONFIG = tiny_config(num_hidden_layers=1, layer_types=["linear_attention"])


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_at_any_step_costs_nothing_but_time(overwrite: bool, tmp_path: Path) -> None:
    """Before or after every write, rename and deletion: no half target, and the second run completes it."""
    src = write_checkpoint(tmp_path / "src", CONFIG, random_tensors(CONFIG))
    dst, reference = tmp_path / "dst", tmp_path / "reference"
    convert_to(src, reference, max_shard_bytes=300_000, dtype="bf16")
    if overwrite:
        convert_to(src, dst, dtype="fp32")
    tests = Path(kill_at_every_step.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, kill_at_every_step.__file__, src, dst, reference]
        + (["overwrite"] if overwrite else []),
        env={**os.environ, "PYTHONPATH": str(tests), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 25
