"""The application `minivllm`: its commands, and what becomes of their errors."""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from minivllm_cli.command import Root
from minivllm_cli.config.flags import print_version
from minivllm_cli.console.json_events import wants_json_events
from minivllm_cli.console.streams import Console, open_missing_streams, silence_stdout
from minivllm_cli.errors import CliError, ExitCode, OutputClosed, Problem

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

    generate_command.register(app)
    chat_command.register(app)
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
    context: Any = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        console.write_line(error.format_message())
        return ExitCode.USAGE
    _keep_close(error)
    message = error.format_message().replace("Value error, ", "").strip().rstrip(".")
    message = message or "Wrong usage"
    path = context.command_path if context is not None else _command_path(args)
    console.error(Problem(message[0].lower() + message[1:], hint=f"{path} --help"))
    return ExitCode.USAGE


def _command_path(args: Sequence[str]) -> str:
    """The command that was meant, where an error does not say in which it arose."""
    commands = {command.name for command in app.registered_commands}
    commands |= {group.name for group in app.registered_groups}
    known = args and args[0] in commands
    return f"minivllm {args[0]}" if known else "minivllm"


def _keep_close(error: typer.TyperException) -> None:
    # Typer proposes whatever shares a few letters: --raw for --graph.
    name, proposed = getattr(error, "option_name", ""), getattr(error, "possibilities", None)
    if proposed:
        by_word = {option.lstrip("-"): option for option in proposed}
        close = get_close_matches(name.lstrip("-"), by_word)
        error.possibilities = [by_word[word] for word in close]  # type: ignore[attr-defined]


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
