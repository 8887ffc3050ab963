"""The benchmarks of kernels and of a step run to their ends, in the interpreter and with tiny shapes."""

import os
import re
import subprocess
import sys
from pathlib import Path

from support.kernel_checks import needs_interpreter

pytestmark = needs_interpreter

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def run(*arguments: str, script: str = "kernels.py") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )


def test_every_group_is_timed_with_what_is_chosen_among_its_lines() -> None:
    done = run("--smoke")
    assert done.returncode == 0, done.stderr
    groups = dict(re.findall(r"^(\w+): us.*\n((?:  .*\n)+)", done.stdout, re.MULTILINE))
    assert set(groups) == {"step", "recurrent", "decode", "prompt", "conv", "greedy", "fused"}
    for lines in groups.values():
        assert "  * " in lines
        assert all(re.search(r" \d+\.\d", line) for line in lines.splitlines())
    assert "left out" not in done.stdout


def test_what_time_does_not_allow_is_counted() -> None:
    done = run("--smoke", "--only", "conv,fused", "--seconds", "0")
    assert "9 lines were left out" in done.stdout


def test_a_group_that_is_not_there_is_named() -> None:
    done = run("--smoke", "--only", "conv,steps")
    assert done.returncode == 2 and "no such group: steps" in done.stderr


def test_a_step_is_timed_for_each_batch_size() -> None:
    done = run("--smoke", "--batch", "1", "2", script="step_time.py")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["1", "2"]
    for _, early, ordered, saved, eager, limit in rows:
        assert float(early) > 0 and float(ordered) > 0 and float(eager) > 0
        assert saved.endswith("%") and limit.endswith("%")
    assert "Warning" not in done.stderr, "numbers that were not finite"


def test_a_step_of_prompts_is_padded_and_gives_what_it_gives_unpadded() -> None:
    done = run("--smoke", script="prefill_step.py")
    assert done.returncode == 0, done.stderr
    (row,) = done.stdout.splitlines()[1:]
    assert row.split()[:4] == ["1x5", "64", "x", "1"]
    assert float(row.split()[-1]) < 0.05
