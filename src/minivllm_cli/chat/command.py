"""`minivllm chat`: its options, and the choice between a conversation and one answer."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from minivllm_cli.command import Invocation, command
from minivllm_cli.config.flags import (
    CacheDumpOption,
    EngineFlags,
    ModelArgument,
    OptionGroup,
    SamplingFlags,
    ThinkFlags,
)
from minivllm_cli.errors import CliError, ExitCode
from minivllm_cli.startup import configure

if TYPE_CHECKING:
    from minivllm_cli.config.settings import Settings

_CHAT = "Chat"


def _option(*names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(
        *names, help=help, metavar=metavar, show_default=False, rich_help_panel=_CHAT
    )


@dataclass(frozen=True)
class ChatFlags(OptionGroup):
    """Flags of `chat` alone."""

    config_paths: ClassVar[dict[str, str]] = {"system": "chat.system"}

    system: Annotated[
        str | None, _option("--system", metavar="TEXT", help="System text  [chat.system]")
    ] = None
    load: Annotated[
        Path | None, _option("--load", metavar="FILE", help="Go on with a chat that /save wrote")
    ] = None
    transcript: Annotated[
        Path | None,
        _option("--transcript", metavar="FILE", help="Append each turn to this .jsonl file"),
    ] = None
    resume: Annotated[
        bool, _option("--resume", help="With --transcript: go on with the chat in it")
    ] = False
    no_stats: Annotated[
        bool, _option("--no-stats", help="No line of figures after an answer  [chat.stats]")
    ] = False
    no_history: Annotated[
        bool,
        _option("--no-history", help="Neither read nor store what is typed  [chat.history]"),
    ] = False
    vi: Annotated[bool, _option("--vi", help="vi keys at the prompt")] = False
    cache_dump: CacheDumpOption = None

    def typed(self) -> dict[str, tuple[str, Any]]:
        """Collect as other groups do; a flag that switches off sets its key to false."""
        found = super().typed()
        if self.no_stats:
            found["chat.stats"] = ("--no-stats", False)
        if self.no_history:
            found["chat.history"] = ("--no-history", False)
        return found


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
