"""Progress on stderr: what is measured, and the styles in which it is shown."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from minivllm_cli.console.bar import Bar
from minivllm_cli.console.signals import Interrupts
from minivllm_cli.console.streams import Console
from minivllm_engine.core.stats import EngineStats
from minivllm_engine.core.units import format_size

_logger = logging.getLogger(__name__)
# Reading a prompt of this many tokens takes long enough to be shown.
LONG_PROMPT = 4096
_RATE_SECONDS = 5.0
_PLAIN_SECONDS = 10.0
_LOAD_SECONDS = 1.0
_REPEAT_SECONDS = 5.0
_JSON_SECONDS = 1.0
_MANY_BYTES = 1 << 16


@dataclass
class Progress:
    """Where a phase is.

    Attributes:
        phase: "reading" (the input), "loading", "weights", "prompt" (a single long one), "generate",
            "bench" (samples); of a conversion, "compare", "resume", "write", "hash", "verify" and "check".
        done, total: in the phase's unit: bytes, tokens, sequences; total 0 where there is no measure.
        unit: named where it could be taken for another one: "outputs", of which a request may have several.
        detail: what is loaded or read, such as "shard 3/11".
        bytes_s: bytes a second, in a phase that is measured so.
        mean_length: output tokens of a finished sequence, on average.
        hit: share of the prompt tokens that were reused; None where there is no prefix cache.
        prefill: computed and all tokens of a long prompt that is being read.
    """

    phase: str
    done: int = 0
    total: int = 0
    detail: str = ""
    unit: str = ""
    failed: int = 0
    out_tok_s: float = 0.0
    in_tok_s: float = 0.0
    bytes_s: float | None = None
    eta_s: float | None = None
    mean_length: float | None = None
    hit: float | None = None
    prefill: tuple[int, int] | None = None
    stats: EngineStats | None = None

    @property
    def percent(self) -> int:
        """Whole percent done; 100 only when all is done."""
        return self.done * 100 // self.total if self.total else 0


@dataclass
class RateMeter:
    """Tokens a second over the last five seconds."""

    _samples: deque[tuple[float, int, int]] = field(default_factory=deque)

    def add(self, out_tokens: int, in_tokens: int, now: float | None = None) -> None:
        """Note both running totals."""
        now = time.monotonic() if now is None else now
        self._samples.append((now, out_tokens, in_tokens))
        while len(self._samples) > 2 and now - self._samples[1][0] > _RATE_SECONDS:
            self._samples.popleft()

    @property
    def seconds(self) -> float:
        """How much time the samples span."""
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0

    def rates(self) -> tuple[float, float]:
        """Return output and prompt tokens a second; zeros before there are two samples."""
        if len(self._samples) < 2:
            return 0.0, 0.0
        first, last = self._samples[0], self._samples[-1]
        seconds = last[0] - first[0]
        if seconds <= 0:
            return 0.0, 0.0
        return (last[1] - first[1]) / seconds, (last[2] - first[2]) / seconds


class Reporter(Protocol):
    """Shows progress. `update` may be called at every step; it decides itself what to show."""

    def update(self, progress: Progress) -> None:
        """Take the newest state. Begins a phase when it differs from the last one."""

    def close(self) -> None:
        """Leave the terminal as it was. May be called again."""


class Silent:
    """Style `off`; with nothing on screen, nothing is to be removed."""

    def update(self, progress: Progress) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Do nothing."""


class PlainLines(Silent):
    """A line when a phase begins, each 10 seconds and at each 10 %. No escape sequences."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase = ""
        self._tenth = 0
        self._shown_at = 0.0

    def update(self, progress: Progress) -> None:
        """Write a line if it is time for one."""
        now = time.monotonic()
        tenth = progress.percent // 10
        waited = now - self._shown_at
        if progress.phase == self._phase and waited < _PLAIN_SECONDS:
            # Loading a small model passes all its tenths in a moment: that is one line, not ten.
            hurried = (
                progress.phase not in ("generate", "bench")
                and waited < _LOAD_SECONDS
                and tenth < 10
            )
            if tenth <= self._tenth or hurried:
                return
        self._phase, self._tenth, self._shown_at = progress.phase, tenth, now
        self._console.note(plain_line(progress))


class JsonLines(Silent):
    """One object a line: when a phase begins and ends, and at most once a second between."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase = ""
        self._shown_at = 0.0

    def update(self, progress: Progress) -> None:
        """Write a line if it is time for one."""
        now = time.monotonic()
        ends = progress.total > 0 and progress.done >= progress.total
        if progress.phase == self._phase and not ends and now - self._shown_at < _JSON_SECONDS:
            return
        self._phase, self._shown_at = progress.phase, now
        fields: dict[str, Any] = {"done": progress.done, "total": progress.total}
        if progress.bytes_s is None:
            fields["failed"] = progress.failed
            fields["out_tok_s"] = round(progress.out_tok_s, 1)
            fields["in_tok_s"] = round(progress.in_tok_s, 1)
        else:
            fields["detail"] = progress.detail
            fields["bytes_s"] = round(progress.bytes_s)
        if progress.unit:
            fields["unit"] = progress.unit
        eta = None if progress.eta_s is None else round(progress.eta_s)
        self._console.event("progress", phase=progress.phase, **fields, eta_s=eta)


class BarOnTerminal:
    """Style `bar`: drawn in place, removed at the end."""

    def __init__(self, console: Console) -> None:
        self._bar = Bar(console)

    def update(self, progress: Progress) -> None:
        """Show this state at the next refresh."""
        figures, pools = _figures(progress), _pools(progress)
        self._bar.show(progress.phase, progress.done, progress.total, figures, pools)

    def close(self) -> None:
        """Remove the bar and show the cursor."""
        self._bar.close()


def _figures(progress: Progress) -> str:
    """What stands behind the bar; on a narrow terminal the end is cut off."""
    parts = [counts(progress)]
    if progress.phase == "generate":
        parts[0] += f"  err {progress.failed}"
        parts.append(f"out {short_count(progress.out_tok_s)} tok/s")
        parts.append(f"ETA {'-' if progress.eta_s is None else clock(progress.eta_s)}")
        parts.append(f"in {short_count(progress.in_tok_s)} tok/s{hit_text(progress)}")
        if progress.mean_length is not None:
            parts.append(f"len {progress.mean_length:.0f}")
    if progress.bytes_s:
        parts.append(speed(progress))
    return " │ ".join(parts)


def _pools(progress: Progress) -> str:
    """The second line: what runs, and how full the pools are."""
    stats = progress.stats
    if stats is None:
        return ""
    waits = f" ({stats.bound_by})" if stats.num_waiting and stats.bound_by else ""
    parts = [f"run {stats.num_running}  wait {stats.num_waiting}{waits}"]
    if progress.prefill is not None:
        parts.append(prefill_text(progress.prefill))
    parts += pool_texts(stats)
    parts.append(f"preempt {stats.num_preemptions}")
    parts.append(f"{stats.kv_blocks_used:,}/{stats.kv_blocks_total:,} blk")
    return " │ ".join(parts)


def make_reporter(style: str, console: Console) -> Reporter:
    """Make the reporter of a style. `auto` is a bar on a live terminal, else lines; -q shows none."""
    if style == "json":
        return JsonLines(console)
    if style == "off" or console.quiet:
        return Silent()
    if style == "auto":
        style = "bar" if console.live else "plain"
    if style == "bar" and console.live:
        return BarOnTerminal(console)
    return PlainLines(console)


@contextmanager
def loading_progress(
    reporter: Reporter, interrupts: Interrupts
) -> Iterator[Callable[[str, int, int], None]]:
    """Make what the engine calls while it loads; it raises KeyboardInterrupt once a signal came.

    A phase that takes long, as compiling kernels can, is said again and again: a start never looks dead.
    """
    newest: Progress | None = None
    ended, turn = threading.Event(), threading.Lock()

    def show(phase: str, done: int, total: int) -> None:
        nonlocal newest
        interrupts.check()
        if newest is None or phase != newest.phase:
            _logger.debug("begins: %s", phase)
        with turn:
            newest = Progress(phase, done, total)
            reporter.update(newest)

    def repeat() -> None:
        while not ended.wait(_REPEAT_SECONDS):
            with turn:
                if newest is not None:
                    reporter.update(newest)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield show
    finally:
        ended.set()
        thread.join()


def plain_line(progress: Progress) -> str:
    """Write one plain line: "generate 812/1000 81% err 3 out 6.8k tok/s in 41.2k tok/s ETA 0:41"."""
    parts = [f"{progress.phase} {counts(progress)}"]
    if progress.phase == "generate":
        parts.append(f"err {progress.failed}")
        parts.append(f"out {short_count(progress.out_tok_s)} tok/s")
        parts.append(f"in {short_count(progress.in_tok_s)} tok/s{hit_text(progress)}")
        if progress.stats is not None:
            parts += pool_texts(progress.stats)
        if progress.prefill is not None:
            parts.append(prefill_text(progress.prefill))
        if progress.eta_s is not None and progress.done < progress.total:
            parts.append(f"ETA {clock(progress.eta_s)}")
    if progress.bytes_s:
        parts.append(speed(progress))
    return "  ".join(parts)


def counts(progress: Progress) -> str:
    """Write what is done of what there is: "812/1,000 81%"; "4,096/14,490 (28%)" before that phase."""
    if not progress.total:
        return progress.detail
    if progress.phase == "generate":
        unit = f" {progress.unit}" if progress.unit else ""
        return f"{progress.done:,}/{progress.total:,}{unit} {progress.percent}%"
    if progress.phase == "bench":
        return f"{progress.done:,}/{progress.total:,} samples  {progress.detail}"
    in_bytes = progress.phase in ("weights", "reading") or progress.bytes_s is not None
    if in_bytes and progress.total > _MANY_BYTES:
        amounts = f"{format_size(progress.done)}/{format_size(progress.total)}"
    else:
        amounts = f"{progress.done:,}/{progress.total:,}"
    detail = f"{progress.detail}  " if progress.bytes_s is not None and progress.detail else ""
    return f"{detail}{amounts} ({progress.percent}%)"


def speed(progress: Progress) -> str:
    """Write the rate of a phase in bytes, and the time left: "1.90 GiB/s  ETA 0:25"."""
    text = f"{format_size(round(progress.bytes_s or 0))}/s"
    if progress.eta_s is not None and progress.done < progress.total:
        text += f"  ETA {clock(progress.eta_s)}"
    return text


def hit_text(progress: Progress) -> str:
    """Write what part of the prompts was reused: " (hit 38%)"."""
    return "" if progress.hit is None else f" (hit {progress.hit:.0%})"


def pool_texts(stats: EngineStats) -> list[str]:
    """Write how full each pool is: KV blocks, state slots and, with a cache, snapshots."""
    used, total = stats.kv_blocks_used, stats.kv_blocks_total
    texts = [
        f"KV {used * 100 // max(total, 1)}%",
        f"state {stats.state_slots_used}/{stats.state_slots_total}",
    ]
    if stats.snapshots_total:
        texts.append(f"snap {stats.snapshots_used}/{stats.snapshots_total}")
    return texts


def prefill_text(prefill: tuple[int, int]) -> str:
    """Write how far a long prompt was read: "prompt 4,096/14,490 (28%)"."""
    done, total = prefill
    return f"prompt {done:,}/{total:,} ({done * 100 // max(total, 1)}%)"


def short_count(number: float) -> str:
    """Write a rate in four characters or so: "96.3", "6.8k", "1.2M"."""
    for scale, unit in ((1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.1f}{unit}"
    return f"{number:.1f}"


def clock(seconds: float) -> str:
    """Write a duration: "0:41", "12:07", "1:02:03"."""
    whole = max(round(seconds), 0)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
