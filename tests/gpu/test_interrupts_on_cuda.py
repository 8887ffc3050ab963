"""H17: Ctrl-C while weights are loaded, graphs captured and answers made. No process stays on the card."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cli.program import wait_for
from minivllm_engine.memory.devices import gpu_state
from support.on_card import needs_card

pytestmark = needs_card

# Sizes that leave the card to other tests, and many graphs.
SMALL = (
    *("--max-num-seqs", "48", "--device", "cuda", "--progress", "plain"),
    *("--set", "cache.num_blocks=400", "--set", "cache.snapshot_memory=16MiB"),
    *("--set", "engine.max_model_len=4096"),
)


@dataclass
class Run:
    """`minivllm generate demo` in a session of its own, so that all its processes can be found."""

    home: Path
    process: "subprocess.Popen[bytes]" = field(init=False)

    def start(self, *args: str) -> None:
        path = os.pathsep.join(p for p in (*map(os.path.abspath, sys.path), "") if p)
        with open(self.home / "stderr", "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "minivllm_cli", "generate", "demo", *args, *SMALL],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
                cwd=self.home,
                env={**os.environ, "PYTHONPATH": path, "TERM": "dumb"},
                start_new_session=True,
            )

    @property
    def stderr(self) -> str:
        return (self.home / "stderr").read_text()

    @property
    def saved(self) -> int:
        partial = self.home / "out.jsonl.partial"
        return partial.read_bytes().count(b"\n") - 1 if partial.exists() else 0

    def interrupt_when(self, condition: Callable[[], bool]) -> None:
        """Ctrl-C as soon as `condition` holds. Asserts the code, and that nothing is left."""
        wait_for(lambda: condition() or self.process.poll() is not None, 150)
        assert self.process.poll() is None, self.stderr
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(30) == 130, self.stderr
        assert "Traceback" not in self.stderr
        with pytest.raises(ProcessLookupError):
            os.killpg(self.process.pid, 0)
        state = gpu_state()
        assert state is not None and self.process.pid not in state.pids


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    lines = [{"id": n, "prompt": f"Define word number {n}."} for n in range(400)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = Run(tmp_path)
    try:
        yield run
    finally:
        if hasattr(run, "process") and run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
            run.process.wait()


@pytest.mark.parametrize("phase", ["weights", "graphs"])
def test_h17_while_the_engine_starts(run: Run, phase: str) -> None:
    run.start("-i", "in.jsonl", "-o", "out.jsonl")
    run.interrupt_when(lambda: re.search(rf"^{phase} ", run.stderr, re.MULTILINE) is not None)
    assert "stopping while loading the model" in run.stderr
    assert not list(run.home.glob("out*"))


def test_h17_while_answers_are_made(run: Run) -> None:
    """Running requests finish within their ten seconds, and what is done is kept."""
    run.start(
        *("-i", "in.jsonl", "-o", "out.jsonl"),
        *("--set", "sampling.max_tokens=600", "--set", "sampling.ignore_eos=true"),
    )
    run.interrupt_when(lambda: run.saved >= 1)
    assert "stopping: no new requests" in run.stderr
    assert 1 <= run.saved < 400
    assert f"{run.saved}/400 saved" in run.stderr
