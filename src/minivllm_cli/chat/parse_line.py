"""What a typed text is: a message, a command with its argument, a wish to leave, or nothing."""

from dataclasses import dataclass

from minivllm_cli.errors import CliError

FENCE = '"""'
_LEAVE = ("exit", "quit", "/exit", "/quit", "/bye")


@dataclass(frozen=True, slots=True)
class Say:
    """A message to the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Run:
    """A slash command and what follows it on the line."""

    name: str
    argument: str


@dataclass(frozen=True, slots=True)
class Leave:
    """`exit` or `quit`, with or without a slash."""


TypedLine = Say | Run | Leave | None


def opens_block(text: str) -> bool:
    """Tell whether `text` begins a block in triple quotes that is not closed yet."""
    start = text.lstrip()
    if not start.startswith(FENCE):
        return False
    return len(start.rstrip()) < 2 * len(FENCE) or not start.rstrip().endswith(FENCE)


def classify(text: str) -> TypedLine:
    """Read a typed text. One with a line break, or in triple quotes, is no command; `//x` says `/x`."""
    stripped = text.strip()
    if stripped.startswith(FENCE) and not opens_block(text):
        inner = stripped[len(FENCE) : -len(FENCE)].strip("\r\n")
        return Say(inner) if inner.strip() else None
    if not stripped:
        return None
    if "\n" in stripped:
        return Say(text.strip("\n").rstrip())
    if stripped in _LEAVE:
        return Leave()
    if stripped.startswith("//"):
        return Say(stripped[1:])
    if stripped.startswith("/"):
        name, _, argument = stripped.partition(" ")
        return Run(name, argument.strip())
    return Say(stripped)


def whole_number(command: str, argument: str, least: int | None = None) -> int:
    """Read the integer that follows a command.

    Raises:
        CliError: it is none, or below `least`.
    """
    try:
        number = int(argument)
    except ValueError:
        raise CliError(f"{command} {argument}: not a whole number") from None
    if least is not None and number < least:
        raise CliError(f"{command} {argument}: not {least} or more")
    return number
