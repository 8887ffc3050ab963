"""Lines at the foot of a terminal, drawn in place by Rich."""

import os
import sys

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from minivllm_cli.console.streams import Console

_BAR_WIDTH = 24


class Bar:
    """A bar between its label and its figures, and a line below. Other lines on stderr appear above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rich = RichConsole(
            file=sys.stderr,
            force_terminal=True,
            no_color=not console.colour,
            markup=False,
            emoji=False,
            highlight=False,
        )
        self._live: Live | None = None
        self._lines: Group = Group()
        self._drawn: list[int] = []  # cells of each line on screen

    def show(self, label: str, done: int, total: int, figures: str, below: str) -> None:
        """Show this at the next refresh. Where it is narrow, the bar gives way, then the ends of lines.

        Args:
            total: 0 where there is no measure, and no bar.
            below: the second line, or "".
        """
        columns = [Column(no_wrap=True, min_width=len(label))]
        cells: list[RenderableType] = [Text(label)]
        if total:
            columns.append(Column(max_width=_BAR_WIDTH))
            cells.append(ProgressBar(total, done))
        first = Table.grid(
            *columns, Column(no_wrap=True, overflow="ellipsis"), padding=(0, 1, 0, 0)
        )
        first.add_row(*cells, Text(figures))
        second = [Text(below, no_wrap=True, overflow="ellipsis")] if below else []
        self._lines = Group(first, *second)
        if self._live is None:
            # A new one each time: one that was stopped would begin by wiping what stands where it was.
            self._drawn = []
            self._live = Live(
                get_renderable=self._render,
                console=self._rich,
                refresh_per_second=8,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
            self._console.show_bar(self._write_above, self.close)

    def close(self) -> None:
        """Remove it and show the cursor."""
        if self._live is not None:
            live, self._live = self._live, None
            self._console.forget_bar()
            live.stop()

    def _write_above(self, line: str) -> None:
        self._rich.print(Text.from_ansi(line), soft_wrap=True)

    def _render(self) -> Group:
        width = self._rich.width
        # A narrower terminal has broken the lines, and Rich wipes as many as it wrote. xterm cuts them.
        broken = sum(max(cells - 1, 0) // width for cells in self._drawn)
        if broken and "XTERM_VERSION" not in os.environ:
            sys.stderr.write("\r\x1b[2K\x1b[1A" * broken)
        self._drawn = [
            Segment.get_line_length(line)
            for line in self._rich.render_lines(self._lines, pad=False)
        ]
        return self._lines
