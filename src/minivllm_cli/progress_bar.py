"""The two lines of progress at the foot of a terminal."""

from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.text import Text

from minivllm_cli.console import Console
from minivllm_cli.progress import (
    Progress,
    clock,
    counts,
    hit_text,
    pool_texts,
    prefill_text,
    short_count,
    speed,
)

_MIN_BAR, _MAX_BAR = 6, 24


class BarOnTerminal:
    """Style `bar`: drawn in place, removed at the end. Other lines on stderr appear above it."""

    def __init__(self, console: Console) -> None:
        import sys

        self._console = console
        self._rich = RichConsole(
            file=sys.stderr,
            force_terminal=True,
            no_color=not console.colour,
            markup=False,
            emoji=False,
            highlight=False,
        )
        self._progress = Progress("")
        self._live = Live(
            get_renderable=self._render,
            console=self._rich,
            refresh_per_second=8,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._started = False

    def update(self, progress: Progress) -> None:
        """Show this state at the next refresh."""
        self._progress = progress
        if not self._started:
            self._started = True
            self._live.start()
            self._console.draw_above(self._write_above)

    def close(self) -> None:
        """Remove the bar and show the cursor."""
        if self._started:
            self._started = False
            self._console.draw_above(None)
            self._live.stop()

    def _write_above(self, line: str) -> None:
        self._rich.print(Text.from_ansi(line), soft_wrap=True)

    def _render(self) -> Group:
        progress, width = self._progress, self._rich.width
        lines = [_first_line(progress, width), _second_line(progress)]
        return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in lines if line))


def _first_line(progress: Progress, width: int) -> str:
    text = f" {counts(progress)}"
    if progress.phase == "generate":
        text += f"  err {progress.failed}"
        if progress.mean_length is not None:
            text += f"  len {progress.mean_length:.0f}"
        text += f" │ out {short_count(progress.out_tok_s)} tok/s"
        text += f"  in {short_count(progress.in_tok_s)} tok/s{hit_text(progress)}"
        text += f" │ ETA {'-' if progress.eta_s is None else clock(progress.eta_s)}"
    if progress.bytes_s:
        text += f" │ {speed(progress)}"
    if not progress.total:
        return f"{progress.phase}{text}"
    room = width - cell_len(text) - len(progress.phase) - 2
    bar = _bar(progress, max(_MIN_BAR, min(room, _MAX_BAR)))
    return f"{progress.phase} {bar}{text}"


def _bar(progress: Progress, width: int) -> str:
    halves = progress.done * 2 * width // progress.total if progress.total else 0
    full, half = divmod(halves, 2)
    return ("━" * full + ("╸" if half else "")).ljust(width, "─")


def _second_line(progress: Progress) -> str:
    stats = progress.stats
    if stats is None:
        return ""
    wait = f"wait {stats.num_waiting}"
    if stats.num_waiting and stats.bound_by:
        wait += f" ({stats.bound_by})"
    kv, *pools = pool_texts(stats)
    parts = [
        f"run {stats.num_running}  {wait}",
        f"{kv}  {stats.kv_blocks_used:,}/{stats.kv_blocks_total:,} blk",
        *pools,
        f"preempt {stats.num_preemptions}",
    ]
    if progress.prefill is not None:
        parts.insert(1, prefill_text(progress.prefill))
    return " │ ".join(parts)
