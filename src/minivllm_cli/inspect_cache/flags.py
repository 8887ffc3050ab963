"""The flags of `inspect-cache`."""

from dataclasses import dataclass
from typing import Any

from minivllm_cli.config.flags import OptionGroup, flag, switch
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
_OUTPUT = "Output"


@dataclass(frozen=True)
class InspectFlags(OptionGroup):
    """Flags of `inspect-cache` alone."""

    memory: str | None = flag(
        "Plan for a GPU of that size, such as 80GiB; with --device cpu for so much RAM",
        metavar="SIZE",
        panel=_PLAN,
    )
    solve: Solvable | None = flag(
        "Print the largest value that fits with nothing else lowered, as YAML to paste"
    )
    input: str | None = flag(
        "Prompts as JSON lines, to be run", short="-i", metavar="FILE|-", panel=_RUN
    )
    recalibrate: bool = switch(
        "Print the KV blocks that the measured graph reserve allows, as YAML to paste"
    )
    sort: SortKey | None = flag("What comes first; hits if nothing is said", panel=_TREE)
    filter_: list[str] | None = flag(
        f"Only segments of a kind ({', '.join(FILTERS)}), or of a hash; repeatable",
        metavar="KIND|HASH",
    )
    limit: int | None = flag(f"At most N segments, {DEFAULT_LIMIT} if nothing is said", metavar="N")
    show_text: bool = switch("The text of each segment, not its counts alone")
    json_: bool = switch("One JSON document; the table moves to stderr", panel=_OUTPUT)

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
