"""`minivllm chat` as tests run it, with the scripted engine: piped, or in a terminal."""

import sys
from pathlib import Path
from typing import Any

from cli.chat.terminal import Terminal
from cli.program import Program

_SCRIPTED = Path(__file__).with_name("scripted_minivllm.py")


class Chat(Program):
    """Programs with `chat MODEL` already on the command line.

    Attributes:
        model: MODEL.
        history: where typed texts are kept.
    """

    def __init__(self, home: Path, model: Path | str, command: list[str] | None = None) -> None:
        super().__init__(home, command or [sys.executable, str(_SCRIPTED), "chat", str(model)])
        self.history = home / "state" / "minivllm" / "history"

    @property
    def requests(self) -> list[dict[str, Any]]:
        """What the engine got: `prompt` as text, `ids`, `params`."""
        return self.engine_log

    @property
    def prompts(self) -> list[str]:
        return [request["prompt"] for request in self.requests]

    @property
    def questions(self) -> list[str]:
        """The last message of each request."""
        ends = [prompt.rpartition("<|im_start|>user\n")[2] for prompt in self.prompts]
        return [end.partition("<|im_end|>")[0] for end in ends]

    def open(self, *args: str | Path, rows: int = 24, columns: int = 100, **extra: str) -> Terminal:
        """Start it in a terminal."""
        env = self.environ(**{"TERM": "xterm-256color", **extra})
        del env["COLUMNS"]
        argv = [*self.command, *map(str, args)]
        return Terminal(argv, env, self.home, rows=rows, columns=columns)
