"""The program run within the test's own process, for wherever a process is not the subject."""

import io
import os
import sys
from contextlib import ExitStack, chdir
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from cli.fake_minivllm import FACTORY
from cli.program import FAKE, REAL, Finished, Program
from minivllm_cli import engine
from minivllm_cli.app import run


@dataclass
class InProcess(Program):
    """A Program whose `run` starts no process. `start`, and a run that reads stdin, still do."""

    def run(
        self, *args: str | Path, stdin: bytes | None = b"", timeout: float = 120, **extra: str
    ) -> Finished:
        """Run to the end, here."""
        if stdin or self.command not in (FAKE, REAL):
            return super().run(*args, stdin=stdin, timeout=timeout, **extra)
        out, err = io.BytesIO(), io.BytesIO()
        with ExitStack() as stack:
            stack.enter_context(patch.dict(os.environ, self.environ(**extra), clear=True))
            stack.enter_context(chdir(self.home))
            for name, raw in (("stdin", io.BytesIO()), ("stdout", out), ("stderr", err)):
                stream = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)
                stack.enter_context(patch.object(sys, name, stream))
            if self.command == FAKE:
                stack.enter_context(patch.multiple(engine, **FACTORY))
            code = run(list(map(str, args)))
            return Finished(code, out.getvalue(), err.getvalue())

    def run_process(
        self, *args: str | Path, stdin: bytes | None = b"", timeout: float = 120, **extra: str
    ) -> Finished:
        """Run to the end, in a process of its own."""
        return super().run(*args, stdin=stdin, timeout=timeout, **extra)
