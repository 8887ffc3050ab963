"""What a chat shows: answers, the line after each, and what commands print."""

from minivllm_cli.chat.answer_view import AnswerView, ThinkingDisplay
from minivllm_cli.chat.statistics import context_used, context_warning, statistics_line
from minivllm_cli.chat.word_wrap import terminal_columns, wrapped
from minivllm_cli.console.streams import Console, Results
from minivllm_engine.core.outputs import RequestOutput


class Screen:
    """Answers and what was asked for go to `results`; everything else to the console.

    Attributes:
        thinking: how thinking is shown.
        stats: whether an answer is followed by its figures.
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
        self._colour = colour
        self._columns = terminal_columns(results.file)
        self._warned_of_context = False
        self._explained: set[str | None] = set()

    def answer_view(self) -> AnswerView:
        """A view for one more answer."""
        return AnswerView(
            self.results,
            self.console,
            thinking=self.thinking,
            colour=self._colour,
            columns=self._columns,
        )

    def print(self, text: str, *, indent: int = 0) -> None:
        """One or more lines that the user asked for; `indent` blanks begin what a line goes on with."""
        if self._columns is not None:
            text = wrapped(text, self._columns(), indent)
        self.results.write_text(text + "\n")

    def after_answer(
        self, output: RequestOutput, max_model_len: int, shortfall: str | None = None
    ) -> None:
        """The statistics line, and a warning when the context fills up.

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
