"""`generate` runs within the test's process, unless a test starts it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.in_process import InProcess
from cli.program import Program


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = InProcess(tmp_path)
    yield program
    program.end_all()
