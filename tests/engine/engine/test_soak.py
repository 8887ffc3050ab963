"""benchmarks/soak.py (E14), short, on a CPU with steps launched ahead; and that it sees what is wrong."""

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.soak import Soak
from minivllm_engine import LLM
from support.device_engine import Rig
from support.graph_reference import graph_reference

SCRIPT = Path(__file__).parents[3] / "benchmarks/soak.py"


@pytest.fixture
def llm(tiny_model) -> Iterator[LLM]:
    with Rig("cpu", graph_reference()).engine(tiny_model, num_blocks=40) as llm:
        yield llm


def soak(llm: LLM, seconds: float, step_limit: float = 60) -> Soak:
    soak = Soak(llm, 8, step_limit, 600, random.Random(0))
    soak.run(seconds)
    return soak


def test_e14_nothing_fails_and_nothing_stays(llm: LLM) -> None:
    done = soak(llm, 3)
    assert done.failures == []
    assert done.seen["finished"] > 5 and done.seen["aborted"] > 0
    assert done.summary().startswith("ok, ")


def test_e14_a_slow_step_is_seen(llm: LLM, monkeypatch) -> None:
    runner = llm._loop.runner
    run = runner.run

    def slow(*args):
        time.sleep(0.3)
        return run(*args)

    monkeypatch.setattr(runner, "run", slow)
    assert soak(llm, 2, step_limit=0.2).failures[0].startswith("step 1 took ")


def test_e14_a_leak_and_a_failed_request_are_seen(llm: LLM, monkeypatch) -> None:
    release = type(llm._cache.states).release
    calls = []

    def leaky(self, slot):
        calls.append(slot)
        if len(calls) != 10:
            release(self, slot)

    monkeypatch.setattr(type(llm._cache.states), "release", leaky)
    told = " ".join(soak(llm, 4).failures)  # at a check on the way, or at the end
    assert "held slots disagree" in told or "state_slots_used is 1" in told


def test_e14_a_step_that_never_returns_ends_the_program(tmp_path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import time\n"
        "from minivllm_engine.engine.loop import EngineLoop\n"
        "EngineLoop.step = lambda self: time.sleep(60)\n"
    )
    args = ["--model", "demo", "--minutes", "0.1", "--concurrency", "2", "--step-limit", "0.1"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *args],
        env={"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr and "in _step" in done.stderr


def test_e14_the_program_runs_on_a_cpu() -> None:
    args = ["--model", "demo", "--minutes", "0.02", "--concurrency", "4", "--step-limit", "60"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *args],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ok, ") and done.stdout.count("\n") == 1
