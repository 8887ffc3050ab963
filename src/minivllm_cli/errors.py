"""What goes wrong on a command line: the errors of this package, how they read, and their exit codes."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from minivllm_engine.core.errors import CapacityError, ConversionError, EngineError, RequestError

MAX_LINES = 6
MAX_COLUMNS = 2000


class ExitCode(IntEnum):
    """Every code with which a command ends."""

    OK = 0
    FAILED = 1
    USAGE = 2
    SOME_REQUESTS_FAILED = 3
    DOES_NOT_FIT = 4
    CHECK_FAILED = 5
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141
    TERMINATED = 143


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, as a person reads it.

    Attributes:
        what: a sentence naming the thing.
        excerpt: lines that show the place, such as a source line and a caret below it.
        why: the figures behind it.
        hint: something that works as it is written.
    """

    what: str
    excerpt: tuple[str, ...] = ()
    why: str | None = None
    hint: str | None = None

    def lines(self, label: str = "error") -> list[str]:
        """Write the problem on at most six lines: `error:`, the excerpt, `why:`, `try:`.

        Lines of what and why are shortened in the middle where they would run over the screen; a hint is
        there to be copied.
        """
        tail = [f"try: {line}" for line in _one_line(self.hint)]
        why = [_shortened(line) for line in self.why.splitlines()] if self.why else []
        what = [_shortened(line) for line in self.what.splitlines()] or [""]
        lines = [f"{label}: {what[0]}", *what[1:], *self.excerpt]
        lines += [("why: " if i == 0 else "     ") + line for i, line in enumerate(why)]
        room = MAX_LINES - len(tail)
        if len(lines) > room:
            lines = [*lines[: room - 1], f"     ... and {len(lines) - room + 1} lines more"]
        return lines + tail


def _one_line(text: str | None) -> list[str]:
    return [" ".join(text.split())] if text else []


def _shortened(line: str) -> str:
    if len(line) <= MAX_COLUMNS:
        return line
    kept = MAX_COLUMNS // 2
    return f"{line[:kept]} ... {line[-kept:]}"


class CliError(Exception):
    """A mistake in how a command was called or configured, found before a model is loaded.

    Args:
        what: the problem in a sentence, or a whole `Problem`, or several to be shown at once.
    """

    exit_code = ExitCode.USAGE

    def __init__(
        self,
        what: str | Problem | Sequence[Problem],
        *,
        why: str | None = None,
        hint: str | None = None,
    ) -> None:
        if isinstance(what, str):
            what = Problem(what, why=why, hint=hint)
        self.problems: list[Problem] = [what] if isinstance(what, Problem) else list(what)
        super().__init__("; ".join(problem.what for problem in self.problems))


class EngineDied(CliError):
    """The engine failed as a whole; whatever was journaled is kept."""

    exit_code = ExitCode.FAILED


class OutputFailed(CliError):
    """Results cannot be written any more: the disk is full, the device refuses."""

    exit_code = ExitCode.FAILED


class OutputClosed(CliError):
    """The reader of stdout has gone away. Nobody is left to be told."""

    exit_code = ExitCode.OUTPUT_CLOSED

    def __init__(self) -> None:
        super().__init__("stdout was closed by its reader")


def problems_of(error: CliError | EngineError) -> list[Problem]:
    """List what to show for a known error."""
    if isinstance(error, CliError):
        return error.problems
    return [Problem(error.what, why=error.why, hint=error.hint)]


# The one place where a class of error becomes an exit code; the first class that fits decides.
_CODES: tuple[tuple[type[EngineError], ExitCode], ...] = (
    (CapacityError, ExitCode.DOES_NOT_FIT),
    (RequestError, ExitCode.SOME_REQUESTS_FAILED),
)

# A conversion has one class of error, and its code says whether a check failed.
_CONVERSION_CODES = {
    "not_covered": ExitCode.CHECK_FAILED,
    "non_finite": ExitCode.CHECK_FAILED,
    "verification": ExitCode.CHECK_FAILED,
    "write_failed": ExitCode.FAILED,
}


def exit_code_of(error: CliError | EngineError) -> ExitCode:
    """Return the exit code of a known error. A bare EngineError is a failure of the engine itself."""
    if isinstance(error, CliError):
        return error.exit_code
    if isinstance(error, ConversionError):
        return _CONVERSION_CODES.get(error.code, ExitCode.USAGE)
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return ExitCode.FAILED if type(error) is EngineError else ExitCode.USAGE
