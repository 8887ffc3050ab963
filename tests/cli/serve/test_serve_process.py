"""The server as a process: its signals, its exit codes, what it refuses before the model is loaded."""

import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from cli.in_process import InProcess
from cli.program import FAKE
from cli.serve.conftest import start

SLOW = {"FAKE_STEP_SECONDS": "0.02", "FAKE_TOKENS": "1"}


def chat(script: str, **more: object) -> dict:
    return {"messages": [{"role": "user", "content": script}], **more}


class Reader(threading.Thread):
    """Reads a stream until it ends."""

    def __init__(self, url: str, asked: dict) -> None:
        super().__init__(daemon=True)
        self.url, self.asked, self.lines = url, {**asked, "stream": True}, list[str]()
        self.start()
        deadline = time.monotonic() + 30
        while len(self.lines) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)

    def run(self) -> None:
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=self.asked) as answer:
            for line in answer.iter_lines():
                if line:
                    self.lines.append(line)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_runs_is_finished_after_the_first_signal(
    tmp_path: Path, fake_model: Path, number: int
) -> None:
    served = start(tmp_path, list(FAKE), str(fake_model), **SLOW)
    reader = Reader(served.url, chat("count 40", max_tokens=200))
    assert served.stop(number) == 0
    reader.join(30)
    assert reader.lines[-1] == "data: [DONE]"
    assert not (tmp_path / "stdout").read_bytes(), "stdout is for answers, and there are none"


def test_a_second_signal_leaves_at_once(tmp_path: Path, fake_model: Path) -> None:
    served = start(tmp_path, list(FAKE), str(fake_model), **SLOW)
    reader = Reader(served.url, chat("forever", max_tokens=4000))
    served.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if httpx.get(f"{served.url}/health").status_code == 503:
            break
    assert served.stop() == 0
    reader.join(30)
    assert '"code":"shutting_down"' in reader.lines[-1]


def test_the_time_to_finish_is_bounded(tmp_path: Path, fake_model: Path) -> None:
    limit = ("--shutdown-timeout", "0.2")
    served = start(tmp_path, list(FAKE), str(fake_model), *limit, **SLOW)
    reader = Reader(served.url, chat("forever", max_tokens=4000))
    assert served.stop() == 0
    reader.join(30)
    assert '"code":"shutting_down"' in reader.lines[-1]


def test_a_dead_engine_ends_the_server_with_exit_1(tmp_path: Path, fake_model: Path) -> None:
    served = start(tmp_path, list(FAKE), str(fake_model))
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=chat("crash"))
    assert answer.status_code == 503
    assert served.process.wait(30) == 1
    assert "error: the engine failed" in (tmp_path / "stderr").read_text()


def test_what_is_refused_before_the_model_is_loaded(tmp_path: Path, fake_model: Path) -> None:
    program = InProcess(tmp_path)

    def refused(*args: str, **extra: str) -> str:
        done = program.run("serve", fake_model, *args, **extra)
        assert done.code == 2 and "weights" not in done.err, done.err
        return done.err

    assert "--api-key KEY, or --insecure" in refused("--host", "0.0.0.0", "--port", "0")
    assert "the key is empty" in refused("--api-key", "")
    assert "cannot be read" in refused("--api-key", "@missing")
    assert "--max-body x" in refused("--max-body", "x")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1:{port}" in refused("--port", port)
    assert "cannot listen" in refused("--port", "99999")
    assert "cannot listen" in refused("--host", "no.such.host.invalid", "--insecure")


def test_tokens_are_sent_when_they_come(tmp_path: Path, fake_model: Path) -> None:
    """Nagle's algorithm would hold them back: the socket is opened so that asyncio switches it off."""
    from minivllm_cli.serve.lifecycle import listen

    with listen("127.0.0.1", 0) as opened:
        assert opened.proto == socket.IPPROTO_TCP
