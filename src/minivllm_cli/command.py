"""The frame around every command: flags spread from groups, help, errors rendered, one exit code."""

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from minivllm_cli.config.flags import CommonOptions, OptionGroup
from minivllm_cli.console.logging import route_logging
from minivllm_cli.console.signals import Interrupts
from minivllm_cli.console.streams import Console, open_missing_streams, silence_stdout
from minivllm_cli.diagnostics import write_crash_file
from minivllm_cli.errors import (
    CliError,
    EngineDied,
    ExitCode,
    OutputClosed,
    Problem,
    exit_code_of,
    problems_of,
)
from minivllm_engine.core.errors import EngineError

_Group = TypeVar("_Group", bound=OptionGroup)


class GroupedCommand(TyperCommand):
    """A command whose help is plain text, its flags under their headings. Rich is not loaded for it."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then one list of flags a heading, in the order of declaration."""
        panels = _panels(self.get_params(ctx), ctx)
        common = panels.pop(CommonOptions.panel)
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)
        names = [names.partition(",")[0].partition(" ")[0] for names, _ in common]
        with formatter.section(f"{CommonOptions.panel} (minivllm --help)"):
            formatter.write_text(", ".join(names))


class Root(TyperGroup):
    """The program itself: its help shows what every command takes, and the commands."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options of every command once, and the commands."""
        command = next(iter(self.commands.values()))
        panels = _panels([*command.params, *self.get_params(ctx)], ctx)
        with formatter.section(CommonOptions.panel):
            formatter.write_dl(panels[CommonOptions.panel])
        with formatter.section(OptionGroup.panel):
            formatter.write_dl(panels[OptionGroup.panel])
        self.format_commands(ctx, formatter)


def _panels(params: Iterable[Any], ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Names and help of parameters, by the heading under which they were declared."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for param in params:
        record = param.get_help_record(ctx)
        default = "Arguments" if param.param_type_name == "argument" else OptionGroup.panel
        if record is not None:
            panels.setdefault(getattr(param, "rich_help_panel", None) or default, []).append(record)
    return panels


@dataclass(frozen=True)
class Invocation:
    """One call of a command: what every command needs and no option group holds."""

    command: str
    options: CommonOptions
    console: Console
    interrupts: Interrupts


def command(app: typer.Typer, name: str) -> Callable[[Callable[..., int]], Callable[..., None]]:
    """Register a function as the command `name`.

    Its first parameter is an `Invocation`; parameters whose annotation is an `OptionGroup` are spread;
    the others go to Typer as they are. It returns its exit code.
    """

    def register(function: Callable[..., int]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        groups: dict[str, type[OptionGroup]] = {}
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(function).parameters.values():
            kind = hints[parameter.name]
            if kind is Invocation:
                continue
            if isinstance(kind, type) and issubclass(kind, OptionGroup):
                groups[parameter.name] = kind
                parameters += _spread(kind)
            else:
                parameters.append(_keyword(parameter.name, kind, parameter.default))
        parameters += _spread(CommonOptions)

        @functools.wraps(function)
        def run(**values: Any) -> None:
            options = _gather(CommonOptions, values)
            filled = {key: _gather(kind, values) for key, kind in groups.items()}
            raise typer.Exit(
                run_guarded(name, options, lambda call: function(call, **values, **filled))
            )

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name, cls=GroupedCommand)(run)
        return run

    return register


def run_guarded(name: str, options: CommonOptions, body: Callable[[Invocation], int]) -> ExitCode:
    """Run `body`; whatever it raises becomes a message on stderr and an exit code."""
    open_missing_streams()
    console = Console(
        quiet=options.quiet,
        verbosity=options.verbose,
        debug=options.debug,
        json_events=options.progress == "json",
    )
    route_logging(console)
    interrupts = Interrupts(console)
    with interrupts.installed():
        try:
            if options.quiet and options.verbose:
                raise CliError("-q and -v exclude each other", hint="one of them")
            return ExitCode(body(Invocation(name, options, console, interrupts)))
        except BaseException as error:
            return _report(error, console, interrupts, name)


def _report(
    error: BaseException, console: Console, interrupts: Interrupts, command: str
) -> ExitCode:
    if interrupts.received is not None and not isinstance(error, CliError):
        # Whatever an interrupted import or kernel raised on the way out, this was the cause.
        return interrupts.exit_code
    if isinstance(error, OutputClosed):
        silence_stdout()
        console.write_line("stopped: stdout was closed by its reader")
        return ExitCode.OUTPUT_CLOSED
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, CliError | EngineError):
        for problem in problems_of(error):
            console.error(problem)
        if isinstance(error, EngineDied):
            console.write_line(
                f"details: {write_crash_file(error, command) or 'could not be written'}"
            )
        if console.debug:
            _print_traceback(error, console)
        return exit_code_of(error)
    if isinstance(error, SystemExit | typer.Exit | typer.TyperException):
        raise error
    path = write_crash_file(error, command)
    message = " ".join(str(error).split()) or type(error).__name__
    console.error(
        Problem(
            f"unexpected {type(error).__name__}: {message}",
            why=f"this is a bug; its details are in {path}" if path else None,
            hint="the same command with --debug shows the traceback",
        )
    )
    if console.debug:
        _print_traceback(error, console)
    return ExitCode.FAILED


def _print_traceback(error: BaseException, console: Console) -> None:
    import traceback

    console.write("".join(traceback.format_exception(error)))


def _spread(group: type[OptionGroup]) -> list[inspect.Parameter]:
    return [_keyword(*parameter) for parameter in group.parameters()]


def _keyword(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _gather(kind: type[_Group], values: dict[str, Any]) -> _Group:
    return kind(**{f.name: values.pop(f.name) for f in fields(kind)})  # type: ignore[arg-type]
