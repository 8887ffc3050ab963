"""`minivllm chat` as tests run it, with the scripted engine: in this process, piped, or in a terminal."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli.chat import scripted_minivllm
from cli.chat.terminal import Terminal
from cli.program import Finished, Program
from minivllm_cli.app import run
from minivllm_cli.chat import command, opening, piped
from minivllm_cli.chat.commands import run_command
from minivllm_cli.chat.history_file import HistoryFile
from minivllm_cli.chat.prompt import PromptInterrupt
from minivllm_cli.chat.repl import Repl
from minivllm_cli.chat.screen import Screen
from minivllm_cli.console.streams import Results

_SCRIPTED = Path(scripted_minivllm.__file__)


class Chat(Program):
    """Programs with `chat MODEL` already on the command line.

    Attributes:
        model: MODEL.
        history: where typed texts are kept.
    """

    def __init__(self, home: Path, model: Path | str, command: list[str] | None = None) -> None:
        super().__init__(home, command or [sys.executable, str(_SCRIPTED), "chat", str(model)])
        self.model = model
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

    @contextmanager
    def _in_process(self, extra: dict[str, str], stdin: bytes = b"") -> Iterator["_Streams"]:
        streams = _Streams()
        with pytest.MonkeyPatch.context() as patch:
            if _SCRIPTED.name in "".join(self.command):
                scripted_minivllm.install(patch.setattr)
            for name, value in self.environ(**extra).items():
                patch.setenv(name, value)
            patch.chdir(self.home)
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            patch.setattr(sys, "stderr", streams.stderr)
            results = Results(streams.stdout)  # type: ignore[arg-type]
            for module in (opening, piped):
                patch.setattr(module, "claim_stdout", lambda: results)
            patch.setattr(os, "isatty", lambda descriptor: False)
            yield streams

    def pipe(self, *args: str | Path, stdin: bytes = b"", **extra: str) -> Finished:
        """Run it to the end in this process, with `stdin` piped in."""
        with self._in_process(extra, stdin) as streams:
            code = run(["chat", str(self.model), *map(str, args)])
        return Finished(code, streams.stdout.data, streams.stderr.data)

    @contextmanager
    def talk(self, *args: str | Path, **extra: str) -> Iterator["Talk"]:
        """An interactive chat in this process, without a terminal: lines in, text out."""
        started: list[Any] = []
        with self._in_process(extra) as streams, ExitStack() as stack:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(command, "_start", lambda *parts: started.append(parts) or 0)
                assert run(["chat", str(self.model), *map(str, args)]) == 0, streams.text
            ((invocation, settings, flags),) = started
            chat = stack.enter_context(
                opening.open_chat(
                    invocation,
                    settings,
                    load=flags.load,
                    transcript=flags.transcript,
                    resume=flags.resume,
                )
            )
            options = chat.settings.chat
            screen = Screen(
                opening.claim_stdout(),
                invocation.console,
                thinking=options.thinking,
                stats=options.stats,
                colour=False,
            )
            history = HistoryFile(self.history, invocation.console.warn)
            prompt: Any = TypedPrompt()
            repl = Repl(chat, screen, prompt, history, invocation.interrupts, run_command)
            yield Talk(repl, prompt, streams)


class Talk:
    """A REPL whose prompt is this object: each line is handled as if it had been typed."""

    def __init__(self, repl: Repl, prompt: "TypedPrompt", streams: "_Streams") -> None:
        self.repl = repl
        self._prompt = prompt
        self._streams = streams
        self.shown_at_start = self.text

    @property
    def text(self) -> str:
        """All that was shown on both streams."""
        return self._streams.text

    @property
    def offered(self) -> list[str]:
        """The texts that were offered for an edit."""
        return self._prompt.edited

    def ask(self, line: str, *then: str | None) -> str:
        """Handle a line; what was shown. `then` is typed where it asks further, None is Ctrl-C."""
        before = len(self.text)
        self._prompt.then = list(then)
        self.repl.handle(line)
        assert not self._prompt.then, "it did not ask"
        return self.text[before:].strip("\n")


class TypedPrompt:
    """Stands in for Prompt, with the answers to what it will ask."""

    def __init__(self) -> None:
        self.newline_on_enter = False
        self.then: list[str | None] = []
        self.edited: list[str] = []

    def edit(self, text: str) -> str:
        self.edited.append(text)
        typed = self.then.pop(0)
        if typed is None:
            raise PromptInterrupt
        return typed

    def confirm(self, question: str) -> bool:
        return self.then.pop(0) == "y"


class _Streams:
    """stdout and stderr, apart and as they come together on a terminal."""

    def __init__(self) -> None:
        self.stdout, self.stderr = _Stream(self), _Stream(self)
        self.written = b""

    @property
    def text(self) -> str:
        return self.written.decode()


class _Stream:
    """Takes bytes as stdout's descriptor does, and text as stderr does."""

    encoding = "utf-8"

    def __init__(self, streams: _Streams) -> None:
        self._streams = streams
        self.data = b""

    def write(self, data: bytes | str | memoryview) -> int:
        added = data.encode() if isinstance(data, str) else bytes(data)
        self.data += added
        self._streams.written += added
        return len(data)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False
