"""The flags of `inspect-cache`."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from minivllm_cli.config.flags import OptionGroup
from minivllm_cli.errors import CliError
from minivllm_cli.inspect_cache.solve import Solvable
from minivllm_cli.inspect_cache.tree import (
    DEFAULT_LIMIT,
    FILTERS,
    SortKey,
    TreeOptions,
    check_filters,
)

_PLAN, _RUN, _TREE = "Plan", "Run", "Tree (run, and dumps)"


def _option(*names: str, panel: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(
        *names, help=help, metavar=metavar, show_default=False, rich_help_panel=panel
    )


@dataclass(frozen=True)
class InspectFlags(OptionGroup):
    """Flags of `inspect-cache` alone."""

    memory: Annotated[
        str | None,
        _option(
            "--memory",
            metavar="SIZE",
            panel=_PLAN,
            help="Plan for a GPU of that size, such as 80GiB; with --device cpu for so much RAM",
        ),
    ] = None
    solve: Annotated[
        Solvable | None,
        _option(
            "--solve",
            panel=_PLAN,
            help="Print the largest value that fits with nothing else lowered, as YAML to paste",
        ),
    ] = None
    input: Annotated[
        str | None,
        _option(
            "-i", "--input", metavar="FILE|-", panel=_RUN, help="Prompts as JSON lines, to be run"
        ),
    ] = None
    recalibrate: Annotated[
        bool,
        _option(
            "--recalibrate",
            panel=_RUN,
            help="Print the KV blocks that the measured graph reserve allows, as YAML to paste",
        ),
    ] = False
    sort: Annotated[
        SortKey | None,
        _option("--sort", panel=_TREE, help="What comes first; hits if nothing is said"),
    ] = None
    filter_: Annotated[
        list[str] | None,
        _option(
            "--filter",
            metavar="KIND|HASH",
            panel=_TREE,
            help=f"Only segments of a kind ({', '.join(FILTERS)}), or of a hash; repeatable",
        ),
    ] = None
    limit: Annotated[
        int | None,
        _option(
            "--limit",
            metavar="N",
            panel=_TREE,
            help=f"At most N segments, {DEFAULT_LIMIT} if nothing is said",
        ),
    ] = None
    show_text: Annotated[
        bool,
        _option("--show-text", panel=_TREE, help="The text of each segment, not its counts alone"),
    ] = False
    json_: Annotated[
        bool,
        typer.Option("--json", help="One JSON document; the table moves to stderr"),
    ] = False

    @property
    def tree(self) -> TreeOptions:
        """How the tree is shown.

        Raises:
            CliError: a filter or the limit will not do.
        """
        if self.limit is not None and self.limit < 1:
            raise CliError(f"--limit {self.limit}: should be at least 1")
        return TreeOptions(
            self.sort or SortKey.HITS,
            check_filters(self.filter_ or []),
            self.limit or DEFAULT_LIMIT,
            self.show_text,
        )

    def check(self, view: str) -> None:
        """Refuse what would be ignored.

        Args:
            view: "plan", "run" or "dump".

        Raises:
            CliError: which flag, and where it belongs.
        """
        plan = [("--memory", self.memory), ("--solve", self.solve)]
        tree = [
            ("--sort", self.sort),
            ("--filter", self.filter_),
            ("--limit", self.limit),
            ("--show-text", self.show_text),
        ]
        if view != "plan":
            _refuse(plan, "the view plan", "minivllm inspect-cache [MODEL] plan")
        if view == "plan":
            _refuse(tree, "the views that show a tree", "minivllm inspect-cache run --input FILE")
        if view != "run":
            run = [("--input", self.input), ("--recalibrate", self.recalibrate)]
            _refuse(run, "the view run", "minivllm inspect-cache run --input FILE")
        elif self.input is None:
            raise CliError("run: there are no requests to run", hint="--input FILE (- for stdin)")


def _refuse(flags: list[tuple[str, Any]], where: str, hint: str) -> None:
    for name, value in flags:
        if value:
            raise CliError(f"{name} goes with {where}", hint=hint)
