"""The two lines of progress at the foot of a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.text import Text

from minivllm_cli.console.progress import (
    Progress,
    clock,
    counts,
    hit_text,
    pool_texts,
    prefill_text,
    short_count,
    speed,
)
from minivllm_cli.console.streams import Console

_MIN_BAR, _MAX_BAR = 6, 24
_ALWAYS = 100  # rank of what a line never does without


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
        self._live: Live | None = None

    def update(self, progress: Progress) -> None:
        """Show this state at the next refresh."""
        self._progress = progress
        if self._live is None:
            # A new one each time: one that was stopped would begin by wiping what stands where it was.
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
        """Remove the bar and show the cursor."""
        if self._live is not None:
            live, self._live = self._live, None
            self._console.forget_bar()
            live.stop()

    def _write_above(self, line: str) -> None:
        self._rich.print(Text.from_ansi(line), soft_wrap=True)

    def _render(self) -> Group:
        progress, width = self._progress, self._rich.width
        lines = [_first_line(progress, width), _second_line(progress, width)]
        return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in lines if line))


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a line, with what sets it off from the part before. The lowest rank goes first."""

    text: str
    rank: int = _ALWAYS


def _fitting(pieces: Sequence[_Piece], width: int) -> str:
    """As many of the pieces as fit; those that are always there may be too much."""
    kept = list(pieces)
    while True:
        text = "".join(piece.text for piece in kept)
        lowest = min(kept, key=lambda piece: piece.rank)
        if cell_len(text) <= width or lowest.rank == _ALWAYS:
            return text
        kept.remove(lowest)


def _first_line(progress: Progress, width: int) -> str:
    pieces = [_Piece(f" {counts(progress)}")]
    if progress.phase == "generate":
        pieces.append(_Piece(f"  err {progress.failed}", _ALWAYS if progress.failed else 2))
        if progress.mean_length is not None:
            pieces.append(_Piece(f"  len {progress.mean_length:.0f}", 1))
        pieces += [
            _Piece(f" │ out {short_count(progress.out_tok_s)} tok/s"),
            _Piece(f"  in {short_count(progress.in_tok_s)} tok/s", 4),
            _Piece(hit_text(progress), 3),
            _Piece(f" │ ETA {'-' if progress.eta_s is None else clock(progress.eta_s)}"),
        ]
    if progress.bytes_s:
        pieces.append(_Piece(f" │ {speed(progress)}"))
    room = width - cell_len(progress.phase)
    if progress.total:
        text = _fitting(pieces, room - 1 - _MIN_BAR)
        bar = room - 1 - cell_len(text)
        if bar >= _MIN_BAR:
            return f"{progress.phase} {_bar(progress, min(bar, _MAX_BAR))}{text}"
    return progress.phase + _fitting(pieces, room)


def _bar(progress: Progress, width: int) -> str:
    halves = progress.done * 2 * width // progress.total if progress.total else 0
    full, half = divmod(halves, 2)
    return ("━" * full + ("╸" if half else "")).ljust(width, "─")


def _second_line(progress: Progress, width: int) -> str:
    stats = progress.stats
    if stats is None:
        return ""
    kv, state, *snapshots = pool_texts(stats)
    pieces = [_Piece(f"run {stats.num_running}  wait {stats.num_waiting}")]
    if stats.num_waiting and stats.bound_by:
        pieces.append(_Piece(f" ({stats.bound_by})", 5))
    if progress.prefill is not None:
        pieces.append(_Piece(f" │ {prefill_text(progress.prefill)}", 4))
    pieces += [
        _Piece(f" │ {kv}"),
        _Piece(f"  {stats.kv_blocks_used:,}/{stats.kv_blocks_total:,} blk", 2),
        _Piece(f" │ {state}"),
        *(_Piece(f" │ {text}", 3) for text in snapshots),
        _Piece(f" │ preempt {stats.num_preemptions}", 4 if stats.num_preemptions else 1),
    ]
    return _fitting(pieces, width)
