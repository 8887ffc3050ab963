"""From settings to a chat: checks that need no weights, then the engine, then what is restored."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm_cli import engine
from minivllm_cli.cache_dump.watch import cache_watch
from minivllm_cli.chat.prompts import Template
from minivllm_cli.chat.restore import check_saved_settings, restore
from minivllm_cli.chat.saved_chat import SavedChat, TranscriptFile, load_chat
from minivllm_cli.chat.screen import Screen
from minivllm_cli.chat.session import Chat, check_seed
from minivllm_cli.chat.transcript import Transcript
from minivllm_cli.chat.word_wrap import terminal_columns, wrapped
from minivllm_cli.command import Invocation
from minivllm_cli.config.config_file import Entry
from minivllm_cli.config.settings import Settings
from minivllm_cli.console.progress import Progress, make_reporter
from minivllm_cli.console.streams import Console, claim_stdout, wants_colour
from minivllm_cli.diagnostics import state_dir
from minivllm_cli.errors import CliError, ExitCode
from minivllm_cli.files.fingerprint import fingerprint_parts
from minivllm_cli.files.input_file import read_text
from minivllm_cli.files.output_target import check_side_file
from minivllm_engine.core.errors import EngineError, RequestError
from minivllm_engine.core.units import count_text
from minivllm_engine.text.chat_template import switches_thinking

if TYPE_CHECKING:
    from minivllm_engine.engine.prepare import PreparedModel
    from minivllm_engine.llm import LLM
    from minivllm_engine.text.tokenizer import Tokenizer

_QUIET_LOAD_SECONDS = 1.0


@contextmanager
def open_chat(
    run: Invocation,
    settings: Settings,
    *,
    load: Path | None,
    transcript: Path | None,
    resume: bool,
    cache_dump: Path | None = None,
) -> Iterator[Chat]:
    """Open a chat with its engine, which is closed at the end.

    Args:
        load: a saved chat to go on with.
        transcript: the file to append turns to; with `resume` the chat in it goes on.
        cache_dump: the file for what the prefix cache holds.

    Raises:
        CliError: a file or an option will not do.
        EngineError: the model will not.
    """
    _fit_to_terminal(run.console)
    settings = _for_one_conversation(settings)
    others = {"--transcript": transcript, "--load": load}
    check_side_file("--cache-dump", cache_dump, "cache.json", others)
    prepared = engine.prepare_model(settings, run.command)
    path = prepared.path
    settings = settings.with_model_sampling(prepared.generation_config.sampling)
    settings = _with_system_text(settings, prepared.tokenizer)
    check_seed(settings.source("sampling.seed"), settings.get("sampling.seed"))
    think = _checked_think(run, settings, prepared.tokenizer)
    # No line about a dump at the prompt: it would get between what is typed.
    watch = cache_watch(cache_dump, "chat", settings, prepared, run.console, announce=False)
    with watch.checked(), ExitStack() as stack:
        saved, source = (None, "") if load is None else (load_chat(load), str(load))
        log = None
        if transcript is not None:
            log = TranscriptFile(transcript, resume=resume)
            stack.callback(log.close)
            saved, source = (log.resumed, str(transcript)) if resume else (saved, source)
        if saved is not None:
            check_saved_settings(saved, source)
        model = {
            "name": "demo" if settings.model == "demo" else path.name,
            "hash": fingerprint_parts(path, dtype=settings.get("engine.dtype"))["model"],
        }
        claim_stdout()
        run.interrupts.activity = "loading the model"
        stack.enter_context(watch.answering_signals())
        llm = stack.enter_context(_load(run, settings, prepared))
        stack.enter_context(watch.over(llm))
        run.interrupts.check()
        chat = Chat(llm, model, settings, settings, think=think, log=log, between_steps=watch.poll)
        chat.device = prepared.plan.device
        chat.transcript = chat.transcript.with_system(settings.chat.system)
        if settings.source("sampling.seed") == "default":
            chat.draw_seed()
        if saved is not None:
            _restore(run, chat, saved, source)
        yield chat


def _fit_to_terminal(console: Console) -> None:
    """Break lines on stderr between words, as those of answers."""
    columns = None if sys.stderr is None else terminal_columns(sys.stderr)
    if columns is not None:
        console.break_lines_with(lambda text: wrapped(text, columns()))


def run_repl(run: Invocation, chat: Chat, *, vi: bool) -> ExitCode:
    """Talk until the user leaves. stdin and stdout are terminals."""
    from minivllm_cli.chat.commands import complete, run_command
    from minivllm_cli.chat.history_file import HistoryFile
    from minivllm_cli.chat.prompt import Prompt
    from minivllm_cli.chat.repl import Repl

    results, console = claim_stdout(), run.console
    options = chat.settings.chat
    descriptor = os.dup(results.file.fileno())
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as terminal:
        path = state_dir() / "history"
        history = HistoryFile(path, console.warn) if options.history else None
        screen = Screen(
            results,
            console,
            thinking=options.thinking,
            stats=options.stats,
            colour=wants_colour(terminal),
        )
        prompt = Prompt(terminal, history, complete, vi=vi)
        limit = f"context {chat.llm.max_model_len:,} tokens"
        console.dim(f"{chat.model['name']} · {limit} · /help lists commands, Ctrl-D leaves")
        try:
            return Repl(chat, screen, prompt, history, run.interrupts, run_command).run()
        except (CliError, EngineError):
            raise
        except Exception as error:
            chat.attach_to(error)
            raise


def _checked_think(run: Invocation, settings: Settings, tokenizer: "Tokenizer") -> bool | None:
    """Tell what the template is to be told of thinking."""
    if not tokenizer.has_chat_template:
        raise CliError(
            f"{settings.model} has no chat template",
            hint=f"minivllm generate {settings.model} --prompt TEXT",
        )
    with suppress(
        RequestError
    ):  # a template may refuse it; what rendering imports is there afterwards
        Template(tokenizer, {}).count(Transcript().asked("x"))
    think: bool | None = settings.get("chat.think")
    if think is None or switches_thinking(tokenizer):
        return think
    source = settings.source("chat.think")
    problem = f"{source}: the chat template of {settings.model} has no switch for thinking"
    if source.startswith("--"):
        raise CliError(problem, hint=f"drop {source}")
    run.console.warn(problem)
    return None


def _with_system_text(settings: Settings, tokenizer: "Tokenizer") -> Settings:
    """Read the system text that is meant, and find out whether the model will see it."""
    path = "chat.system"
    entry = settings.entries.get(path)
    if entry is None or entry.value is None:
        return settings
    if entry.value == "-":
        raise CliError(
            f"{entry.source}: the system text cannot come from stdin, which is the conversation",
            hint="@FILE in place of -",
        )
    text = read_text(entry.source, entry.value)
    try:
        Template(tokenizer, {}).check_system(text)
    except RequestError as error:
        raise CliError(f"{entry.source}: {error.what}", why=error.why, hint=error.hint) from None
    entries = {**settings.entries, path: replace(entry, value=text)}
    return Settings(entries, settings.model_sampling)


def _load(run: Invocation, settings: Settings, prepared: "PreparedModel") -> "LLM":
    """Load the model; how far it is is shown once it takes more than a moment."""
    reporter = make_reporter(settings.output.progress, run.console)
    begun = time.monotonic()

    def show(phase: str, done: int, total: int) -> None:
        run.interrupts.check()
        if time.monotonic() - begun >= _QUIET_LOAD_SECONDS:
            reporter.update(Progress(phase, done, total))

    try:
        with run.interrupts.deferred():
            return engine.open_engine(prepared, show)
    finally:
        reporter.close()


def _for_one_conversation(settings: Settings) -> Settings:
    """Ask for one state slot, enough for one sequence at a time, unless somebody set another number."""
    path = "engine.max_num_seqs"
    entries = {path: Entry(path, 1, "chat"), **settings.entries}
    return Settings(entries, settings.model_sampling)


def _restore(run: Invocation, chat: Chat, saved: SavedChat, source: str) -> None:
    notes = restore(chat, saved, source, flags_win=True)
    run.console.note(f"going on with {source}: {count_text(chat.transcript.num_turns, 'turn')}")
    for note in notes:
        run.console.note(note)
