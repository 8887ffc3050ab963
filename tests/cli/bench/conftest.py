"""Fixtures: `minivllm bench` in this process, on a fake engine."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from cli.bench.fake_bench_engine import FakeMachine
from minivllm_cli.app import run


@dataclass(frozen=True)
class Shown:
    """What a run left."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        (line,) = self.out.splitlines()
        found = json.loads(line)
        assert isinstance(found, dict)
        return found


Bench = Callable[..., Shown]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    found = FakeMachine()
    found.install(monkeypatch)
    return found


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    """Run `minivllm bench demo ARGS`; `model=None` leaves the model out."""

    def call(*args: object, model: str | None = "demo") -> Shown:
        capsys.readouterr()
        code = run(["bench", *([] if model is None else [model]), *map(str, args)])
        streams = capsys.readouterr()
        return Shown(code, streams.out, streams.err)

    return call
