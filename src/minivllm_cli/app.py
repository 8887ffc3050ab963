"""The application `minivllm`: its commands, and what becomes of their errors."""

import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from minivllm_cli.command import Root
from minivllm_cli.config.flags import print_version
from minivllm_cli.console import wants_json_events
from minivllm_cli.console.streams import Console, open_missing_streams, silence_stdout
from minivllm_cli.errors import CliError, ExitCode, OutputClosed, Problem
from minivllm_engine.core.suggest import suggest

_UNKNOWN_COMMAND = re.compile("No such command '(.*?)'")

app = typer.Typer(
    name="minivllm",
    cls=Root,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=print_version,
            is_eager=True,
            hidden=True,  # of every command
        ),
    ] = False,
) -> None:
    """Run hybrid Gated DeltaNet + attention language models from local checkpoints.

    minivllm generate demo --prompt "Define aardvark."

    minivllm chat demo
    """


def _register_commands() -> None:
    from minivllm_cli import env as env_command
    from minivllm_cli.bench import command as bench_command
    from minivllm_cli.chat import command as chat_command
    from minivllm_cli.convert import command as convert_command
    from minivllm_cli.generate import command as generate_command
    from minivllm_cli.inspect_cache import command as inspect_command
    from minivllm_cli.serve import command as serve_command

    generate_command.register(app)
    chat_command.register(app)
    serve_command.register(app)
    bench_command.register(app)
    inspect_command.register(app)
    convert_command.register(app)
    env_command.register(app)


_register_commands()


def run(args: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code. Usage errors are written to stderr."""
    console = Console(json_events=wants_json_events(sys.argv[1:] if args is None else args))
    try:
        code: Any = app(args=args, prog_name="minivllm", standalone_mode=False)
    except typer.TyperException as error:
        return _usage_error(error, console, sys.argv[1:] if args is None else args)
    except OutputClosed:
        return _output_closed(console)
    except CliError as error:
        for problem in error.problems:
            console.error(problem)
        return error.exit_code
    except typer.Abort:
        return ExitCode.FAILED
    except SystemExit:
        # How Typer leaves when help is printed into a pipe that nobody reads.
        if type(sys.stdout).__name__ != "PacifyFlushWrapper":
            raise
        return _output_closed(console)
    return code if isinstance(code, int) else ExitCode.OK


def _output_closed(console: Console) -> int:
    silence_stdout()
    console.write_line("stopped: stdout was closed by its reader")
    return ExitCode.OUTPUT_CLOSED


def _usage_error(error: typer.TyperException, console: Console, args: Sequence[str]) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        console.write_line(error.format_message())
        return ExitCode.USAGE
    context: Any = getattr(error, "ctx", None)
    path = context.command_path if context is not None else _command_path(args)
    unknown = _UNKNOWN_COMMAND.match(error.format_message())
    if unknown is not None:
        near = _near_command(unknown[1])
        problem = Problem(f"no such command {unknown[1]!r}", hint=f"minivllm {near or ''} --help")
    else:
        problem = Problem(_usage_text(error), hint=f"{path} --help")
    console.error(problem)
    return ExitCode.USAGE


def _usage_text(error: typer.TyperException) -> str:
    """Tell what is wrong in our words where Typer's are those of its insides."""
    name, proposed = getattr(error, "option_name", None), getattr(error, "possibilities", None)
    if proposed:  # Typer proposes whatever shares a few letters: --raw for --graph
        by_word = {option.lstrip("-"): option for option in proposed}
        near = suggest(str(name).lstrip("-"), by_word)
        error.possibilities = [by_word[near]] if near else []  # type: ignore[attr-defined]
    message = error.format_message().replace("Value error, ", "").strip().rstrip(".")
    message = re.sub("Input should be a valid (integer|number),.*", r"not a whole number", message)
    message = re.sub("^Invalid value for '(.*?)': ", r"\1: ", message) or "wrong usage"
    return message if message.startswith("-") else message[0].lower() + message[1:]


def _commands() -> set[str]:
    return {command.name or "" for command in app.registered_commands}


def _near_command(word: str) -> str | None:
    """The command that begins with a word, or is like it."""
    begun = sorted(name for name in _commands() if name.startswith(word))
    return begun[0] if begun else suggest(word, _commands())


def _command_path(args: Sequence[str]) -> str:
    """The command that was meant, where an error does not say in which it arose."""
    return f"minivllm {args[0]}" if args and args[0] in _commands() else "minivllm"


def run_process() -> int:
    """Run the command line of this process; the exit code."""
    open_missing_streams()
    code = run()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
        code = ExitCode.OUTPUT_CLOSED
    return code
