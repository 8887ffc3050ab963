"""The two standard streams: stdout for results alone, stderr for everything else."""

import errno
import io
import json
import os
import re
import select
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, TextIO

from minivllm_cli.errors import OutputClosed, OutputFailed, Problem

_RED, _YELLOW, _DIM, _RESET = "\x1b[31;1m", "\x1b[33m", "\x1b[2m", "\x1b[0m"
# C0 but for newline and tab, DEL, and C1: what could move the cursor or worse.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def strip_controls(text: str) -> str:
    """Make model text safe for a terminal: no control characters but newline and tab."""
    return _CONTROL.sub("", text)


def showable(text: str, stream: TextIO) -> str:
    """Replace what the encoding of a stream does not know, such as ASCII's: nothing fails over it."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding, "replace")


def wants_colour(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether `stream` may get colours: NO_COLOR and FORCE_COLOR decide before the terminal does."""
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return is_live_terminal(stream, environ)


def is_live_terminal(stream: TextIO | None, environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether the cursor may be moved on `stream`: never because of FORCE_COLOR alone."""
    try:
        return stream is not None and stream.isatty() and environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


class Console:
    """stderr. Everything but `write` and `write_line` drops control characters; results never go here.

    Attributes:
        quiet: errors only.
        live: the cursor may be moved (progress bars).
        colour: colours may be used on stderr.
        json_events: every line is one JSON object with an "event".
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        verbosity: int = 0,
        debug: bool = False,
        json_events: bool = False,
    ) -> None:
        self.quiet = quiet
        self.verbosity = verbosity
        self.debug = debug
        self.live = is_live_terminal(sys.stderr)
        self.colour = wants_colour(sys.stderr)
        self.json_events = False
        if json_events:
            self.use_json_events()
        self._above: Callable[[str], None] | None = None
        self._remove: Callable[[], None] | None = None
        self._break_lines: Callable[[str], str] = _between_words if self.live else str
        self._gone = False

    def use_json_events(self) -> None:
        """Make every line from here on a JSON object: no bar, no colour."""
        self.json_events, self.live, self.colour = True, False, False

    def break_lines_with(self, break_lines: Callable[[str], str]) -> None:
        """Let `break_lines` fit what is written from here on to the terminal; never JSON."""
        self._break_lines = break_lines

    def note(self, text: str) -> None:
        """Write one line for whoever watches. Silent under -q."""
        if not self.quiet:
            self.write_line(strip_controls(text))

    def dim(self, text: str) -> None:
        """Write a note, dimmed."""
        if not self.quiet:
            self._write_fitted(self._painted(_DIM, self._fitted(strip_controls(text))))

    def warn(self, text: str, hint: str | None = None) -> None:
        """Warn of something odd; the run goes on."""
        if self.quiet:
            return
        if self.json_events:
            self.event("log", level="warning", message=text, **_given(hint=hint))
            return
        self._write_labelled(_YELLOW, f"warning: {text}")
        if hint:
            self.note(f"try: {hint}")

    def error(self, problem: Problem) -> None:
        """Show a problem on at most six lines, under -q too."""
        if self.json_events:
            excerpt = "\n".join(problem.excerpt) or None
            more = _given(excerpt=excerpt, why=problem.why, hint=problem.hint)
            self.event("error", message=problem.what, **more)
            return
        first, *rest = problem.lines()
        self._write_labelled(_RED, first)
        for line in rest:
            self.write_line(strip_controls(line))

    def event(self, event: str, **fields: Any) -> None:
        """Write one JSON object on a line, whatever else `json_events` says."""
        self._write_raw_line(json.dumps({"event": event, **fields}, allow_nan=False))

    def show_bar(self, write: Callable[[str], None], remove: Callable[[], None]) -> None:
        """Write lines through `write` while a bar is on screen: it keeps the bar below them.

        Args:
            remove: takes the bar off the screen, until it is drawn again.
        """
        self._above, self._remove = write, remove

    def forget_bar(self) -> None:
        """Forget the bar: there is none on screen (any more)."""
        self._above = self._remove = None

    def remove_bar(self) -> None:
        """Take the bar off the screen: something else is about to be written there."""
        if self._remove is not None:
            self._remove()

    def write_line(self, text: str) -> None:
        """Write a line to stderr now, above the bar if there is one."""
        self._write_fitted(self._fitted(text))

    def write(self, text: str) -> None:
        """Write to stderr now. Once stderr is gone there is nobody to tell."""
        if self.json_events:
            if text.strip():
                self.write_line(text.rstrip("\n"))
            return
        self._write(text)

    def _fitted(self, text: str) -> str:
        return text if self.json_events else self._break_lines(text)

    def _write_labelled(self, colour: str, text: str) -> None:
        """A line that begins with a word in colour; lines are broken before, as colours have no width."""
        fitted = self._fitted(strip_controls(text))
        label = fitted.split(maxsplit=1)[0]
        self._write_fitted(self._painted(colour, label) + fitted.removeprefix(label))

    def _write_fitted(self, text: str) -> None:
        if self.json_events:
            self.event("log", level="info", message=text)
        else:
            self._write_raw_line(text)

    def _write_raw_line(self, text: str) -> None:
        try:
            if self._above is not None:
                self._above(text)
                return
            if self.live and _claimed is not None:
                _claimed.end_line()
            self._write(text + "\n")
        except RuntimeError:
            # A signal's handler says something while this very stream is written to: Python refuses that.
            os.write(2, (text + "\n").encode("utf-8", "replace"))

    def _write(self, text: str) -> None:
        if self._gone or sys.stderr is None:
            return
        try:
            sys.stderr.write(showable(text, sys.stderr))
            sys.stderr.flush()
        except (OSError, ValueError):
            self._gone = True

    def _painted(self, colour: str, text: str) -> str:
        return f"{colour}{text}{_RESET}" if self.colour else text


def _between_words(text: str) -> str:
    """Break lines that are wider than the terminal; not hints and excerpts, which are there to be copied."""
    try:
        columns = os.get_terminal_size(2).columns or sys.maxsize  # 0 where nobody said it
    except OSError:
        return text
    lines: list[str] = []
    for line in text.split("\n"):
        whole = len(line) <= columns or line.startswith(("try: ", "  "))
        broken = textwrap.wrap(line, columns, break_long_words=False, break_on_hyphens=False)
        lines += [line] if whole else broken
    return "\n".join(lines)


def _given(**fields: str | None) -> dict[str, str]:
    return {name: value for name, value in fields.items() if value}


class Results:
    """stdout as the result writer has it: unbuffered bytes to the descriptor saved by `claim_stdout`.

    Attributes:
        is_terminal: somebody reads it as it comes; control characters must not get there.
        open_line: text was written to a terminal, and its line is not ended.
        file: the binary stream below, for libraries that write themselves.
    """

    def __init__(self, file: BinaryIO, name: str = "stdout") -> None:
        self.file = file
        self.open_line = False
        self._name = name
        self._line_was_ended = False
        try:
            self.is_terminal = file.isatty()
        except ValueError:
            self.is_terminal = False

    def write(self, data: bytes) -> None:
        """Write all of `data` and flush.

        Raises:
            OutputClosed: the reader has gone.
            OutputFailed: the device refuses, e.g. because it is full.
        """
        self.open_line = False
        if self._line_was_ended and data == b"\n":
            data = b""
        self._line_was_ended = False
        self._write_all(data)

    def _write_all(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                written = self.file.write(left)
                if written is None:  # a pipe that was made non-blocking by whoever else has it
                    select.select([], [self.file], [])
                left = left[written or 0 :]
            self.file.flush()
        except BrokenPipeError:
            raise OutputClosed from None
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise OutputClosed from None
            reason = error.strerror or str(error)
            raise OutputFailed(f"cannot write results to {self._name}: {reason}") from None

    def write_text(self, text: str) -> None:
        """Write model text as it is, but without control characters on a terminal."""
        encoding = "utf-8"
        if self.is_terminal:
            text, encoding = strip_controls(text), sys.stdout.encoding or encoding
            # Before it is written: a signal's handler may speak in the middle of it.
            self.open_line, self._line_was_ended = not text.endswith("\n"), False
        self._write_all(text.encode(encoding, "replace"))

    def end_line(self) -> None:
        """End the line of an answer on a terminal: a message follows. The newline after it is left out."""
        if self.open_line:
            self.write(b"\n")
            self._line_was_ended = True


_claimed: Results | None = None
_stdout_missing = False


def open_missing_streams() -> None:
    """Give descriptors 0 to 2 that were closed by the caller a harmless target.

    Otherwise the next file opened would become this process's stdout.
    """
    global _stdout_missing
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
            _stdout_missing = _stdout_missing or descriptor == 1
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # for what libraries write themselves
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def claim_stdout() -> Results:
    """Claim stdout for a command that writes results there; see `guard_stdout`.

    Raises:
        OutputClosed: stdout was closed before we started.
    """
    if _stdout_missing:
        raise OutputClosed
    return guard_stdout()


def guard_stdout() -> Results:
    """Keep stdout for results: below Python, descriptor 1 becomes stderr from here on.

    To be called just before the engine is made, so that what C and CUDA libraries print cannot get
    between results. Calling it again gives the same writer. Where `sys.stdout` has no descriptor (a
    test runner) nothing is redirected.
    """
    global _claimed
    if _claimed is not None:
        return _claimed
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, OSError, io.UnsupportedOperation):
        return Results(getattr(sys.stdout, "buffer", io.BytesIO()))
    sys.stdout.flush()
    saved = os.dup(descriptor)
    os.dup2(2, 1)
    _claimed = Results(os.fdopen(saved, "wb", buffering=0))
    return _claimed


def print_result(text: str) -> None:
    """Print text to stdout before it is claimed: help, `--print-config`, tables.

    Raises:
        OutputClosed: the reader has gone.
    """
    if _stdout_missing:
        raise OutputClosed
    try:
        sys.stdout.write(showable(text, sys.stdout))
        sys.stdout.flush()
    except BrokenPipeError:
        raise OutputClosed from None


def silence_stdout() -> None:
    """Point what is left of stdout at nothing, so that the interpreter's last flush cannot fail."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)
