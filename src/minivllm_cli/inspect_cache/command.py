"""The command `inspect-cache`: from its words and options to a view."""

from dataclasses import dataclass
from typing import Annotated

import typer

from minivllm_cli.command import Invocation, command
from minivllm_cli.inspect_cache.solve import Solvable
from minivllm_cli.options import EngineFlags, OptionGroup


@dataclass(frozen=True)
class PlanFlags(OptionGroup):
    """Flags of the view `plan`."""

    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            show_default=False,
            help="Plan for a GPU of that size, such as 80GiB; with --device cpu for so much RAM",
        ),
    ] = None
    solve: Annotated[
        Solvable | None,
        typer.Option(
            "--solve",
            show_default=False,
            help="Print the largest value that fits, as YAML to paste",
        ),
    ] = None
    json_: Annotated[
        bool,
        typer.Option("--json", help="One JSON document; the table moves to stderr"),
    ] = False


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "inspect-cache")
    def inspect_cache(
        run: Invocation,
        words: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="[MODEL] [plan]",
                help="MODEL: a directory with a config.json, or demo (default).  [model] "
                "plan: what its memory is used for (default view).",
                show_default=False,
            ),
        ] = None,
        *,
        flags: PlanFlags,
        engine: EngineFlags,
    ) -> int:
        """Show what memory a model takes on a device, and what fits. Loads no weights and needs no GPU.

        minivllm inspect-cache demo

        minivllm inspect-cache ./model --memory 80GiB --max-model-len 32K

        minivllm inspect-cache ./model --memory 24GiB --solve max_num_seqs
        """
        from minivllm_cli.inspect_cache.words import read_words
        from minivllm_cli.startup import configure

        asked = read_words(words or [])
        settings = configure(run, asked.model, engine, as_json=flags.json_)
        if settings is None:
            return 0
        from minivllm_cli.inspect_cache.plan_view import show_plan

        return show_plan(run, settings, flags)
