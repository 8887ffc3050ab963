"""`minivllm chat`: its options, and the choice between a conversation and one answer."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from minivllm_cli.command import Invocation, command
from minivllm_cli.config.flags import (
    EngineFlags,
    ModelArgument,
    OptionGroup,
    SamplingFlags,
    ThinkFlags,
    cache_dump_flag,
    flag,
    switch,
)
from minivllm_cli.errors import CliError, ExitCode
from minivllm_cli.startup import configure

if TYPE_CHECKING:
    from minivllm_cli.config.settings import Settings


@dataclass(frozen=True)
class ChatFlags(OptionGroup):
    """Flags of `chat` alone."""

    panel: ClassVar[str] = "Chat"

    system: str | None = flag("System text", key="chat.system")
    load: Path | None = flag("Go on with a chat that /save wrote", metavar="FILE")
    transcript: Path | None = flag("Append each turn to this .jsonl file", metavar="FILE")
    resume: bool = switch("With --transcript: go on with the chat in it")
    no_stats: bool = switch("No line of figures after an answer", key="chat.stats", sets=False)
    no_history: bool = switch(
        "Neither read nor store what is typed", key="chat.history", sets=False
    )
    vi: bool = switch("vi keys at the prompt")
    cache_dump: Path | None = cache_dump_flag()


def register(app: typer.Typer) -> None:
    """Add `chat` to the application."""

    @command(app, "chat")
    def chat(
        run: Invocation,
        model: ModelArgument = None,
        *,
        flags: ChatFlags,
        sampling: SamplingFlags,
        thinking: ThinkFlags,
        engine: EngineFlags,
    ) -> int:
        """Talk to a model, or pipe one message in: echo "Define aardvark." | minivllm chat

        /help lists the commands of the chat.
        """
        typed: dict[str, tuple[str, Any]] = {}
        if thinking.enabled is not None:
            typed["chat.think"] = (
                "--think" if thinking.enabled else "--no-think",
                thinking.enabled,
            )
        settings = configure(run, model, flags, sampling, engine, flags=typed)
        return ExitCode.OK if settings is None else _start(run, settings, flags)


def _start(run: Invocation, settings: "Settings", flags: ChatFlags) -> int:
    interactive = sys.stdin is not None and os.isatty(0)
    if interactive and not os.isatty(1):
        raise CliError(
            "chat needs a terminal on stdout too; this one goes elsewhere",
            hint="minivllm generate --prompt TEXT, or pipe a message in",
        )
    if flags.resume and flags.transcript is None:
        raise CliError("--resume goes with --transcript FILE")
    if flags.load is not None and flags.resume:
        raise CliError("--load and --resume exclude each other: both bring a chat")
    from minivllm_cli.chat.opening import open_chat, run_repl
    from minivllm_cli.chat.piped import answer_once, read_question
    from minivllm_cli.config.typed_options import remedies_as_typed

    run.interrupts.activity = "reading stdin"
    question = None if interactive else read_question()
    run.interrupts.activity = "looking at the model"
    opened = open_chat(
        run,
        settings,
        load=flags.load,
        transcript=flags.transcript,
        resume=flags.resume,
        cache_dump=flags.cache_dump,
    )
    with remedies_as_typed(settings), opened as chat:
        if question is None:
            return run_repl(run, chat, vi=flags.vi)
        return answer_once(run, chat, question)
