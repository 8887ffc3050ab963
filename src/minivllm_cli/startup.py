"""What every command that runs a model does first: settings, `--print-config`, a few notes."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minivllm_cli.command import Invocation
from minivllm_cli.config.flags import OptionGroup
from minivllm_cli.config.settings import Settings, resolve_settings
from minivllm_cli.console.logging import route_logging
from minivllm_cli.errors import CliError, problems_of
from minivllm_engine.core.errors import CheckpointError


def user_config(environ: Mapping[str, str]) -> list[Path]:
    """Return the file of whoever runs this, below all others: $XDG_CONFIG_HOME/minivllm/config.yaml."""
    base = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", "/"), ".config")
    path = Path(base) / "minivllm" / "config.yaml"
    return [path] if path.is_file() else []


def configure(
    run: Invocation,
    model: str | None,
    *groups: OptionGroup,
    flags: dict[str, tuple[str, Any]] | None = None,
    runs_model: bool = True,
    as_json: bool = False,
) -> Settings | None:
    """Resolve the settings of this run; None if `--print-config` was asked for and answered.

    Args:
        model: the MODEL argument, if it was typed.
        groups: option groups whose flags set config keys.
        flags: further flags, config key -> (flag, value).
        runs_model: say which model it is where nobody chose one.
        as_json: `--json` was typed; it is meant for `--print-config` too.

    Raises:
        CliError: any mistake in files, environment or arguments.
    """
    options = run.options
    if not options.print_config and (options.sources or options.diff_defaults):
        flag = "--sources" if options.sources else "--diff-defaults"
        raise CliError(f"{flag} goes with --print-config", hint=f"--print-config {flag}")
    typed: dict[str, tuple[str, Any]] = dict(flags or {})
    for group in (options, *groups):
        typed |= group.typed()
    if model is not None:
        typed["model"] = ("MODEL", model)
    settings = resolve_settings(
        files=[*user_config(os.environ), *(options.config or ())],
        assignments=options.set_ or (),
        flags=typed,
        environ=os.environ,
    )
    if settings.output.progress == "json" and not run.console.json_events:
        run.console.use_json_events()
        route_logging(run.console)
    _check_model_name(settings)
    for warning in settings.warnings:
        run.console.warn(warning)
    if options.print_config:
        _print_config(run, settings, as_json)
        return None
    if runs_model:
        _say_what_is_not_obvious(run, settings)
    return settings


def _check_model_name(settings: Settings) -> None:
    # An empty path would be the current directory.
    entry = settings.entries.get("model")
    if entry is not None and not str(entry.value).strip():
        raise CliError(
            f"{entry.source}: the model {entry.value!r} has no name",
            hint="MODEL = demo, or the directory of a checkpoint, such as ./DIR",
        )


def _print_config(run: Invocation, settings: Settings, as_json: bool) -> None:
    from minivllm_cli import engine
    from minivllm_cli.config.show import render_config, render_config_json
    from minivllm_cli.console.streams import print_result

    try:
        path = engine.find_model(settings.model)
        settings = engine.add_model_sampling(settings, path)
    except (CliError, CheckpointError) as error:
        run.console.warn(f"{problems_of(error)[0].what}; its generation config is left out")
    options = run.options
    render = render_config_json if as_json else render_config
    print_result(render(settings, sources=options.sources, diff_defaults=options.diff_defaults))


def _say_what_is_not_obvious(run: Invocation, settings: Settings) -> None:
    if "model" not in settings.entries:
        run.console.note("model: demo (built in; give MODEL or set model: in the config)")
    for path, entry in settings.entries.items():
        if (
            entry.written is not None
            and isinstance(entry.value, int)
            and not entry.written.isdecimal()
        ):
            run.console.note(f"{path}: {entry.written} = {entry.value:,} ({entry.source})")
