"""Arguments of slash commands."""

from minivllm_cli.errors import CliError


def no_argument(command: str, argument: str) -> None:
    """Refuse what follows a command that takes nothing."""
    if argument:
        raise CliError(f"{command} takes no argument, not {argument!r}")


def whole_number(command: str, argument: str) -> int:
    """The integer that follows `command`."""
    try:
        return int(argument)
    except ValueError:
        raise CliError(f"{command} {argument}: not a whole number") from None


def positive_number(command: str, argument: str) -> int:
    """The integer above zero that follows `command`."""
    number = whole_number(command, argument)
    if number < 1:
        raise CliError(f"{command} {argument}: not above zero")
    return number
