"""Fixtures: a model directory for the fake engine, and the program that runs on it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.program import Program
from support.byte_tokenizer import write_byte_tokenizer
from support.loggers import loggers_as_they_were


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """What runs of the program in this process do to the loggers is undone."""
    with loggers_as_they_were():
        yield


@pytest.fixture(autouse=True)
def state_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Crash files, histories and the config of whoever tests have no part in runs in this process."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture(scope="session")
def fake_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fake") / "model"
    path.mkdir()
    write_byte_tokenizer(path)
    (path / "config.json").write_text(json.dumps({"model_type": "fake"}))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_k": 20}))
    (path / "model.safetensors").write_bytes(b"no weights")
    return path


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    program.end_all()
