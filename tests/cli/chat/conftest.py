"""Fixtures: a model directory for the scripted engine, and the chat that runs on it."""

import shutil
from pathlib import Path

import pytest

from cli.chat.program import Chat
from minivllm_engine.checkpoint.index import resolve_model
from support.byte_tokenizer import write_byte_tokenizer


@pytest.fixture(scope="session")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of one token a byte, and the shape of the demo model."""
    path = tmp_path_factory.mktemp("chat") / "scripted"
    path.mkdir()
    write_byte_tokenizer(path)
    shutil.copy(resolve_model("demo") / "config.json", path)
    return path


@pytest.fixture
def chat(tmp_path: Path, scripted_model: Path) -> Chat:
    return Chat(tmp_path, scripted_model)
