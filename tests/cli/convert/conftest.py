"""Fixtures: a small checkpoint to convert, and the command run here or in a process of its own."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.program import REAL, Finished, Program
from support.byte_tokenizer import write_byte_tokenizer
from support.tiny_checkpoint import OFFICIAL, nested, random_tensors, tiny_config, write_checkpoint

Run = Callable[..., Finished]
_SLOW = [sys.executable, str(Path(__file__).with_name("slow_minivllm.py"))]


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """A checkpoint in the official layout and dtype fp32, with a tokenizer, in two shards."""
    config = tiny_config()
    tensors = random_tensors(config, prefix=OFFICIAL)
    path = write_checkpoint(tmp_path / "src", nested(config), tensors, shards=2)
    write_byte_tokenizer(path)
    return path


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """`convert-weights` in this process, where torch is loaded already; relative paths are in tmp_path."""
    from minivllm_cli.app import run

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def convert_weights(*args: str | Path) -> Finished:
        capsys.readouterr()
        code = run(["convert-weights", *map(str, args)])
        captured = capsys.readouterr()
        return Finished(code, captured.out.encode(), captured.err.encode())

    return convert_weights


@pytest.fixture
def real(program: Program) -> Program:
    """`minivllm` as a process of its own."""
    program.command = list(REAL)
    return program


@pytest.fixture
def slow(program: Program) -> Program:
    """The same on a slow disk: a signal can be sent while a shard is written."""
    program.command = list(_SLOW)
    return program
