"""The command `inspect-cache`: from its words and options to a view."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from minivllm_cli.command import Invocation, command
from minivllm_cli.config.flags import EngineFlags
from minivllm_cli.errors import CliError
from minivllm_cli.inspect_cache.flags import InspectFlags

_VIEWS = ("plan", "run")
_USAGE = "minivllm inspect-cache [MODEL] [plan|run], or FILE"


@dataclass(frozen=True, slots=True)
class _Positionals:
    """What the words ask for: a view of a model, or a dump. `model` is None where none is named."""

    view: str
    model: str | None
    dump: Path | None = None


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "inspect-cache")
    def inspect_cache(
        run: Invocation,
        words: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="[MODEL] [plan|run] | FILE",
                help="MODEL: a directory with a config.json, or demo (default).  [model] "
                "plan: what its memory is used for (default view). "
                "run: what a cache holds after the requests of --input. "
                "FILE: what --cache-dump of another run wrote.",
                show_default=False,
            ),
        ] = None,
        *,
        flags: InspectFlags,
        engine: EngineFlags,
    ) -> int:
        """Show what memory a model takes on a device, what fits, and what the prefix cache is good for.

        minivllm inspect-cache demo

        minivllm inspect-cache ./model --memory 24GiB --solve max_num_seqs

        minivllm inspect-cache ./model run --input prompts.jsonl

        minivllm inspect-cache cache.json --filter no-snapshot
        """
        from minivllm_cli.startup import configure

        asked = _read_positionals(words or [])
        view = asked.view if asked.dump is None else "dump"
        flags.check(view)
        options = flags.tree
        settings = configure(
            run, asked.model, engine, as_json=flags.json_, runs_model=asked.dump is None
        )
        if settings is None:
            return 0
        if asked.dump is not None:
            _refuse_settings(run, engine)
            from minivllm_cli.inspect_cache.dump_view import show_dump

            return show_dump(run, asked.dump, options, as_json=flags.json_)
        from minivllm_cli.config.typed_options import remedies_as_typed

        with remedies_as_typed(settings):
            if view == "run":
                from minivllm_cli.inspect_cache.run_view import show_run

                return show_run(run, settings, flags, options)
            from minivllm_cli.inspect_cache.plan_view import show_plan

            return show_plan(run, settings, flags)


def _refuse_settings(run: Invocation, engine: EngineFlags) -> None:
    common = [("--set", run.options.set_), ("--config", run.options.config)]
    given = [flag for flag, _ in engine.typed().values()]
    given += [flag for flag, value in common if value]
    if given:
        raise CliError(f"{given[0]} is for an engine, and a dump is of one that has run")


def _read_positionals(words: Sequence[str]) -> _Positionals:
    """Tell the words apart: at most one view and one MODEL, in any order, or the file of a dump alone.

    A directory that is called as a view is written `./plan`; a regular file is a dump.

    Raises:
        CliError: two of a kind, a dump beside something else, or no such file.
    """
    views = [word for word in words if word in _VIEWS]
    others = [word for word in words if word not in _VIEWS]
    dumps = [word for word in others if Path(word).is_file()]
    models = [word for word in others if word not in dumps]
    for what, found in (("views", views), ("models", models), ("dumps", dumps)):
        if len(found) > 1:
            raise CliError(
                f"two {what}: {found[0]} and {found[1]}",
                why=f"the views are: {', '.join(_VIEWS)}; a file is a dump; any other word is MODEL",
                hint=_USAGE,
            )
    if dumps and (views or models):
        raise CliError(
            f"{dumps[0]} is a dump, which names its model, and {(views + models)[0]} is not for it",
            hint=f"minivllm inspect-cache {dumps[0]}",
        )
    if models and models[0].endswith(".json") and not Path(models[0]).exists():
        raise CliError(
            f"cannot read {models[0]}: no such file",
            hint="minivllm generate --input FILE --cache-dump DUMP writes a dump",
        )
    dump = Path(dumps[0]) if dumps else None
    return _Positionals(views[0] if views else _VIEWS[0], models[0] if models else None, dump)
