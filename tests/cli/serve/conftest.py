"""A server on the demo model, started once, and the clients that talk to it."""

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from cli.program import REAL, Program

KEY = "sk-test"


@dataclass
class Served:
    """A running server."""

    process: "subprocess.Popen[bytes]"
    url: str
    home: Path

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


def start(home: Path, command: list[str], *args: str, **extra: str) -> Served:
    program = Program(home, command)
    process = program.start("serve", *args, "--port", "0", **extra)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        said = (home / "stderr").read_text()
        found = re.search(r"serving .* on (http://\S+)", said)
        if found is not None:
            return Served(process, found[1], home)
        assert process.poll() is None, said
        time.sleep(0.05)
    raise AssertionError("the server does not start")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("serve")
    small = ["--set", "engine.cpu_memory=64MiB", "--max-num-seqs", "8"]
    served = start(home, list(REAL), "demo", *small, "--api-key", KEY)
    yield served
    assert served.stop() == 0, (home / "stderr").read_text()


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client
