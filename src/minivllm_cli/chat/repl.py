"""The loop of an interactive chat: read, answer or run a command, until the user leaves."""

import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from minivllm_cli.chat.history_file import HistoryFile
from minivllm_cli.chat.parse_line import Leave, Run, Say, classify
from minivllm_cli.chat.prompt import Prompt, PromptInterrupt, keys_held_back
from minivllm_cli.chat.screen import AnswerView, Screen
from minivllm_cli.chat.session import Chat, Listener, StopFlag, stopped_before_it_began
from minivllm_cli.chat.statistics import shortfall
from minivllm_cli.chat.transcript import Branches, Transcript
from minivllm_cli.console.signals import Interrupts
from minivllm_cli.console.streams import Console
from minivllm_cli.diagnostics import write_crash_file
from minivllm_cli.errors import CliError, ExitCode, OutputClosed, OutputFailed, Problem, problems_of
from minivllm_engine.core.errors import EngineError
from minivllm_engine.core.outputs import RequestOutput
from minivllm_engine.core.units import count_text

LEAVE_SECONDS = 2.0
_STOP_SECONDS = 1.0


class Repl:
    """One interactive chat on a terminal.

    Args:
        run_command: runs a slash command, given this, its name and its argument.

    Attributes:
        branches: chats that were put aside.
        history: the file of what was typed; None with `--no-history`.
    """

    def __init__(
        self,
        chat: Chat,
        screen: Screen,
        prompt: Prompt,
        history: HistoryFile | None,
        interrupts: Interrupts,
        run_command: Callable[["Repl", str, str], None],
    ) -> None:
        self.chat = chat
        self.screen = screen
        self.prompt = prompt
        self.history = history
        self.branches = Branches()
        self._interrupts = interrupts
        self._run_command = run_command
        self._stop: StopFlag | None = None
        self._stop_requested_at = 0.0
        self._last_interrupt = float("-inf")
        self._num_dropped_lines = 0
        self._restore_terminal: Callable[[], None] = lambda: None

    def run(self) -> ExitCode:
        """Talk until the user leaves.

        Raises:
            KeyboardInterrupt: SIGTERM, or a Ctrl-C that would not wait.
        """
        with (
            keys_held_back() as self._restore_terminal,
            self.prompt.pastes_marked(),
            self._interrupts.stopping_with(self._on_signal),
        ):
            while True:
                try:
                    self._say_what_was_dropped()
                    self.handle(self.prompt.read())
                    if self._interrupts.received is not None:  # SIGTERM came during an answer
                        raise KeyboardInterrupt
                except (PromptInterrupt, KeyboardInterrupt):
                    if self._interrupts.received is not None:
                        raise
                    if self._interrupted_twice():
                        return ExitCode.INTERRUPTED
                except EOFError:
                    self._say_what_is_not_saved()
                    return ExitCode.OK

    def turn(self, run: Callable[[Listener, StopFlag], RequestOutput]) -> None:
        """Let `run` produce an answer on screen. What it raises is shown, and the chat goes on."""
        console, view = self.screen.console, AnswerView(self.screen)
        with self._stoppable() as stop:
            try:
                output = run(view, stop)
            except (OutputClosed, OutputFailed):
                raise
            except Exception as error:
                view.end()
                for problem in _failure(error, self.chat, console):
                    console.error(problem)
                return
        interrupted = output.finish_reason == "abort"
        view.end(interrupted=interrupted)
        if stopped_before_it_began(output):
            console.note("stopped before the first token; the chat is as it was")
            return
        chat = self.chat
        text = shortfall(output.usage, chat.llm.tokenizer, thinking_dropped=chat.drops_thinking)
        self.screen.after_answer(output, chat.llm.max_model_len, text)
        if output.finish_reason == "stop" and not output.text:
            console.note("the model ended without a word")
        if output.finish_reason == "length":
            console.note(_how_to_go_on(chat.transcript))
        self.record()

    def record(self) -> None:
        """Bring the transcript file up to date; a failure is shown and the chat goes on."""
        try:
            self.chat.write_log()
        except CliError as error:
            for problem in error.problems:
                self.screen.console.error(problem)

    def handle(self, text: str) -> None:
        """Answer or run what was typed; an error is shown.

        Raises:
            EOFError: the user leaves.
        """
        line = classify(text)
        try:
            match line:
                case Say(message):
                    history = self.chat.transcript
                    self.turn(lambda view, stop: self.chat.ask(history, message, view, stop))
                case Run(name, argument):
                    self._run_command(self, name, argument)
                    self.record()
                case Leave():
                    raise EOFError
        except (OutputClosed, OutputFailed):
            raise
        except (CliError, EngineError) as error:
            for problem in problems_of(error):
                self.screen.console.error(problem)

    def _interrupted_twice(self) -> bool:
        now = time.monotonic()
        if now - self._last_interrupt <= LEAVE_SECONDS:
            self._say_what_is_not_saved()
            return True
        self._last_interrupt = now
        self.screen.console.write_line("Ctrl-C again within 2 s leaves; so do Ctrl-D and /exit")
        return False

    def _say_what_was_dropped(self) -> None:
        count, self._num_dropped_lines = self._num_dropped_lines, 0
        if count:
            self.screen.console.note(f"{count_text(count, 'typed-ahead line')} dropped")

    def _say_what_is_not_saved(self) -> None:
        count = self.chat.num_unsaved_turns
        if count:
            turns = "1 turn was" if count == 1 else f"{count} turns were"
            self.screen.console.note(
                f"{turns} not saved (/save FILE, or --transcript FILE from the start)"
            )

    @contextmanager
    def _stoppable(self) -> Iterator[StopFlag]:
        self._stop = StopFlag()
        try:
            yield self._stop
        finally:
            self._stop = None

    def _on_signal(self, count: int) -> None:
        terminated = self._interrupts.received == signal.SIGTERM
        if terminated:
            self.screen.console.write_line("stopping: SIGTERM")
            self._interrupts.limit_clean_up()
            self._restore_terminal()  # should the clean-up hang
        else:
            self._num_dropped_lines += self.prompt.drop_typed_ahead()
        if self._stop is None:
            if not terminated:
                self._interrupts.received = None
            raise KeyboardInterrupt
        if not self._stop.requested:
            self._stop.request()
            self._stop_requested_at = time.monotonic()
            if not terminated:
                self._interrupts.received = None
                self._explain_if_slow(self._stop)
        elif terminated or time.monotonic() - self._stop_requested_at > _STOP_SECONDS:
            raise KeyboardInterrupt
        else:  # a second press in haste: the answer is stopping already
            self._interrupts.received = None

    def _explain_if_slow(self, stop: StopFlag) -> None:
        def explain() -> None:
            if self._stop is stop:
                self.screen.console.write_line(
                    "\nstopping after this step. Ctrl-C again leaves the chat at once."
                )

        timer = threading.Timer(_STOP_SECONDS, explain)
        timer.daemon = True
        timer.start()


def _how_to_go_on(stopped: Transcript) -> str:
    """Tell what to do about an answer that max_tokens ended. Without text there is nothing to extend."""
    answer = stopped.last_answer
    if answer is not None and answer.content:
        return "stopped at max_tokens; /continue goes on, /set max_tokens N allows more"
    return "stopped at max_tokens before the answer began; /set max_tokens N, then /regen"


def _failure(error: Exception, chat: Chat, console: Console) -> list[Problem]:
    """Return the problems to show for what an answer raised. The turn has been rolled back.

    An error that nobody expected also leaves a crash file, which holds the transcript.
    """
    if console.debug:
        console.write("".join(traceback.format_exception(error)))
    if isinstance(error, CliError | EngineError):
        return problems_of(error)
    chat.attach_to(error)
    path = write_crash_file(error, "chat")
    message = " ".join(str(error).split()) or type(error).__name__
    return [
        Problem(
            f"engine failed: {message}",
            why=f"{type(error).__name__}; details and transcript are in {path}" if path else None,
            hint="ask again; if it fails again, /save the chat and restart",
        )
    ]
