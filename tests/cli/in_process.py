"""The program run within the test's own process, for wherever a process is not the subject."""

from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from cli.fake_minivllm import FACTORY
from cli.program import FAKE, REAL, Finished, Program
from minivllm_cli import engine


@dataclass
class InProcess(Program):
    """A Program whose `run` starts no process. `start`, and a run that reads stdin, still do."""

    def run(
        self, *args: str | Path, stdin: bytes | None = b"", timeout: float = 120, **extra: str
    ) -> Finished:
        """Run to the end, here."""
        if stdin or self.command not in (FAKE, REAL):
            return super().run(*args, stdin=stdin, timeout=timeout, **extra)
        if self.command == REAL:
            return self.run_here(*args, **extra)
        with patch.multiple(engine, **FACTORY):
            return self.run_here(*args, **extra)

    def run_process(
        self, *args: str | Path, stdin: bytes | None = b"", timeout: float = 120, **extra: str
    ) -> Finished:
        """Run to the end, in a process of its own."""
        return super().run(*args, stdin=stdin, timeout=timeout, **extra)
