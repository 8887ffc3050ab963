"""What a chat shows: answers as they come, the line after each, and what commands print."""

import time
from typing import Literal

from minivllm_cli.chat.statistics import (
    context_used,
    context_warning,
    statistics_line,
    thought_line,
)
from minivllm_cli.chat.word_wrap import StreamedWords, terminal_columns, wrapped
from minivllm_cli.console.progress import prefill_text
from minivllm_cli.console.streams import Console, Results, strip_controls
from minivllm_engine.core.outputs import RequestOutput

ThinkingDisplay = Literal["show", "fold", "hide"]

_DIM, _RESET = b"\x1b[2m", b"\x1b[0m"
_ERASE_LINE = "\r\x1b[2K"
_QUIET_PREFILL_SECONDS = 1.0


class AnswerView:
    """Writes one answer on a screen, as text that is appended and never redrawn."""

    def __init__(self, screen: "Screen") -> None:
        self._results = screen.results
        self._console = screen.console
        self._thinking = screen.thinking
        self._colour = screen.colour
        self._columns = screen.columns
        self._words = StreamedWords()
        self._started = time.monotonic()
        self._thinking_since: float | None = None
        self._thought = False
        self._reasoning_tokens = 0
        self._at_line_start = True
        self._shows_prefill = False

    def show(self, output: RequestOutput) -> None:
        """Write what is new in `output`."""
        if not output.outputs:
            return
        answer = output.outputs[0]
        self._reasoning_tokens = answer.reasoning_tokens
        if answer.reasoning_delta or answer.text_delta or output.finished:
            self._end_prefill()
        elif not answer.token_ids:
            self._show_prefill(output.num_prompt_computed, output.usage.prompt_tokens)
        if answer.reasoning is not None and self._thinking_since is None:
            self._thinking_since = time.monotonic()
        if answer.reasoning_delta:
            self._thought = True
            if self._thinking != "hide":
                self._write_thinking(answer.reasoning_delta)
        if answer.text_delta:
            self._end_thinking()
            self._write(answer.text_delta)

    def end(self, *, interrupted: bool = False) -> None:
        """Finish the last line."""
        self._end_prefill()
        self._end_thinking()
        if interrupted:
            self._mark("[interrupted]")
        if not self._at_line_start:
            self._write("\n")

    def _write(self, text: str) -> None:
        self._results.write(self._fitted(text))
        self._at_line_start = text.endswith("\n")

    def _fitted(self, text: str) -> bytes:
        if self._results.is_terminal:
            text = strip_controls(text)
        if self._columns is not None:
            text = self._words.feed(text, self._columns())
        return text.encode("utf-8", "replace")

    def _write_thinking(self, text: str) -> None:
        dims = self._thinking == "fold" and self._colour
        self._results.write(_DIM if dims else b"")
        self._write(text)
        self._results.write(_RESET if dims else b"")

    def _end_thinking(self) -> None:
        if self._thinking_since is None or not self._thought:
            return
        if not self._at_line_start:
            self._write("\n")
        self._console.dim(
            thought_line(self._reasoning_tokens, time.monotonic() - self._thinking_since)
        )
        self._thought = False

    def _mark(self, text: str) -> None:
        if not self._results.is_terminal:
            self._console.note(text)
            return
        blank = "" if self._at_line_start else " "
        mark = self._fitted(blank + text)
        self._results.write(_DIM + mark + _RESET if self._colour else mark)
        self._at_line_start = False

    def _show_prefill(self, done: int, total: int) -> None:
        late = time.monotonic() - self._started >= _QUIET_PREFILL_SECONDS
        if late and total and self._console.live and not self._console.quiet:
            self._console.write(_ERASE_LINE + prefill_text((done, total)))
            self._shows_prefill = True

    def _end_prefill(self) -> None:
        if self._shows_prefill:
            self._console.write(_ERASE_LINE)
            self._shows_prefill = False


class Screen:
    """Answers and what was asked for go to `results`; everything else to the console.

    Attributes:
        thinking: `show` writes it, `fold` writes it dimmed, `hide` does not; all say how long it took.
        stats: whether an answer is followed by its figures.
        colour: dimming may be used on `results`.
        columns: the width at which lines break between words; None lets them be.
    """

    def __init__(
        self,
        results: Results,
        console: Console,
        *,
        thinking: ThinkingDisplay,
        stats: bool,
        colour: bool,
    ) -> None:
        self.results = results
        self.console = console
        self.thinking = thinking
        self.stats = stats
        self.colour = colour
        self.columns = terminal_columns(results.file)
        self._warned_of_context = False
        self._explained: set[str | None] = set()

    def print(self, text: str, *, indent: int = 0) -> None:
        """Print one or more lines that the user asked for; `indent` blanks begin what a line goes on with."""
        if self.columns is not None:
            text = wrapped(text, self.columns(), indent)
        self.results.write_text(text + "\n")

    def after_answer(
        self, output: RequestOutput, max_model_len: int, shortfall: str | None = None
    ) -> None:
        """Print the statistics line, and a warning when the context fills up.

        `shortfall` says why less was reused than could be; each reason is told once a chat.
        """
        if self.stats:
            self.console.dim(statistics_line(output, max_model_len))
            reason = output.usage.miss_reason
            if shortfall is not None and reason not in self._explained:
                self._explained.add(reason)
                self.console.dim(shortfall)
        warning = context_warning(context_used(output), max_model_len)
        if warning is not None and not self._warned_of_context:
            self.console.warn(warning, hint="/undo or /clear")
        self._warned_of_context = warning is not None
