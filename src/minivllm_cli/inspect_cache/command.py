"""The command `inspect-cache`: from its words and options to a view."""

from typing import Annotated

import typer

from minivllm_cli.command import Invocation, command
from minivllm_cli.config.flags import EngineFlags
from minivllm_cli.errors import CliError
from minivllm_cli.inspect_cache.flags import InspectFlags


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
        from minivllm_cli.inspect_cache.positionals import read_positionals
        from minivllm_cli.startup import configure

        asked = read_positionals(words or [])
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
