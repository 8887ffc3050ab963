"""The options of `bench`, and which of them go together."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from minivllm_cli.config.flags import CacheDumpOption, OptionGroup
from minivllm_cli.errors import CliError
from minivllm_engine.model_config.shapes import SHAPES


class Format(StrEnum):
    """How rows are written."""

    TABLE = "table"
    MD = "md"
    CSV = "csv"
    JSON = "json"
    JSONL = "jsonl"


class Suite(StrEnum):
    """Rows that go together."""

    QUICK = "quick"
    STANDARD = "standard"
    LONG = "long"
    STAGES = "stages"
    PREFIX = "prefix"


Shape = StrEnum("Shape", {f"B{name}": name for name in SHAPES})  # type: ignore[misc]

_WHAT, _HOW, _OUT, _COMPARE = "What is measured", "How", "Results", "Comparing two saved runs"


def _option(*names: str, panel: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(
        *names, help=help, metavar=metavar, show_default=False, rich_help_panel=panel
    )


@dataclass(frozen=True)
class BenchFlags(OptionGroup):
    """What only `bench` takes."""

    config_paths: ClassVar[dict[str, str]] = {
        name: f"bench.{name}"
        for name in (
            "suite",
            "workload",
            "batch",
            "prompt_len",
            "gen_len",
            "depth",
            "num_prompts",
            "groups",
            "reps",
            "warmup",
            "percentiles",
        )
    }

    suite: Annotated[
        Suite | None,
        _option("--suite", panel=_WHAT, help="Rows that go together; standard  [bench.suite]"),
    ] = None
    workload: Annotated[
        str | None,
        _option(
            "--workload",
            metavar="KIND",
            panel=_WHAT,
            help="prefill, decode, mixed, prefix or jsonl:FILE  [bench.workload]",
        ),
    ] = None
    batch: Annotated[
        str | None,
        _option(
            "--batch",
            metavar="LIST",
            panel=_WHAT,
            help="Requests at once: 1,8,64 or 1-64*2  [bench.batch]",
        ),
    ] = None
    prompt_len: Annotated[
        str | None,
        _option(
            "--prompt-len",
            metavar="LIST",
            panel=_WHAT,
            help="Tokens of a prompt; 100~1024 draws them  [bench.prompt_len]",
        ),
    ] = None
    gen_len: Annotated[
        str | None,
        _option(
            "--gen-len",
            metavar="LIST",
            panel=_WHAT,
            help="Tokens of an answer  [bench.gen_len]",
        ),
    ] = None
    depth: Annotated[
        str | None,
        _option(
            "--depth",
            metavar="LIST",
            panel=_WHAT,
            help="decode: tokens in the cache before timing starts; prefix: tokens that are shared  "
            "[bench.depth]",
        ),
    ] = None
    num_prompts: Annotated[
        str | None,
        _option(
            "--num-prompts",
            metavar="N",
            panel=_WHAT,
            help="Requests of a row, as many as --batch if nothing is said  [bench.num_prompts]",
        ),
    ] = None
    groups: Annotated[
        str | None,
        _option(
            "--groups",
            metavar="N",
            panel=_WHAT,
            help="prefix: different prefixes that are shared  [bench.groups]",
        ),
    ] = None
    shape: Annotated[
        Shape | None,
        _option("--shape", panel=_WHAT, help="Random weights of that shape instead of MODEL"),
    ] = None
    graph: Annotated[
        bool, _option("--graph", panel=_HOW, help="Decode with CUDA graphs; needs CUDA")
    ] = False
    eager: Annotated[
        bool, _option("--eager", panel=_HOW, help="Decode without; with CUDA both are the default")
    ] = False
    reps: Annotated[
        str | None,
        _option("--reps", metavar="N", panel=_HOW, help="Repetitions of each row  [bench.reps]"),
    ] = None
    warmup: Annotated[
        str | None,
        _option("--warmup", metavar="N", panel=_HOW, help="Untimed ones before  [bench.warmup]"),
    ] = None
    percentiles: Annotated[
        str | None,
        _option(
            "--percentiles", metavar="LIST", panel=_HOW, help="Of latencies  [bench.percentiles]"
        ),
    ] = None
    strict_equal: Annotated[
        bool, _option("--strict-equal", panel=_HOW, help="Exit 5 where variants give other tokens")
    ] = False
    verify: Annotated[
        int | None,
        _option(
            "--verify",
            metavar="N",
            panel=_HOW,
            help="Answer every Nth request that reused a prefix again from nothing, and compare",
        ),
    ] = None
    format: Annotated[
        Format | None, _option("--format", panel=_OUT, help="How rows are written; table")
    ] = None
    json_: Annotated[
        bool, _option("--json", panel=_OUT, help="As --format json; the table moves to stderr")
    ] = False
    save: Annotated[
        Path | None,
        _option("--save", metavar="FILE", panel=_OUT, help="Write the JSON document to FILE"),
    ] = None
    overwrite: Annotated[
        bool, _option("--overwrite", panel=_OUT, help="Replace the FILE of --save if it is there")
    ] = False
    help_metrics: Annotated[
        bool, _option("--help-metrics", panel=_OUT, help="Say what each figure means and leave")
    ] = False
    cache_dump: CacheDumpOption = None
    compare: Annotated[
        tuple[Path, Path] | None,
        _option("--compare", metavar="BASE NEW", panel=_COMPARE, help="Files of --save"),
    ] = None
    fail_if_slower: Annotated[
        str | None,
        _option(
            "--fail-if-slower",
            metavar="SHARE",
            panel=_COMPARE,
            help="Exit 5 if a row is slower by more than, say, 3%, and it is not noise",
        ),
    ] = None
    metric: Annotated[
        str | None,
        _option("--metric", metavar="NAME", panel=_COMPARE, help="What is compared; tok_s"),
    ] = None
    force: Annotated[
        bool, _option("--force", panel=_COMPARE, help="Compare runs of other GPUs or models")
    ] = False

    @property
    def output_format(self) -> Format:
        """How rows are written.

        Raises:
            CliError: `--json` and another `--format`.
        """
        if self.json_ and self.format not in (None, Format.JSON):
            raise CliError(f"--json and --format {self.format} exclude each other")
        return Format.JSON if self.json_ else self.format or Format.TABLE

    def check(self, model: str | None) -> None:
        """Refuse what would be ignored.

        Raises:
            CliError: which flags do not go together.
        """
        if self.verify is not None and self.verify < 1:
            raise CliError(f"--verify {self.verify}: should be at least 1")
        if self.compare is None:
            for flag, value in (
                ("--fail-if-slower", self.fail_if_slower),
                ("--metric", self.metric),
                ("--force", self.force),
            ):
                if value not in (None, False):
                    raise CliError(f"{flag} goes with --compare", hint="--compare BASE NEW")
            if self.overwrite and self.save is None:
                raise CliError("--overwrite goes with --save", hint="--save FILE")
            if self.shape is not None and model is not None:
                raise CliError("MODEL and --shape exclude each other", hint="one of them")
            if self.suite is not None and self.workload is not None:
                raise CliError(
                    "--suite and --workload exclude each other", why="a suite has its own workloads"
                )
            return
        for flag in self._measuring(model):
            raise CliError(f"{flag} measures, and --compare only reads two saved runs")

    def _measuring(self, model: str | None) -> list[str]:
        given = [flag for flag, _ in self.typed().values()]
        more: list[tuple[str, Any]] = [
            ("MODEL", model),
            ("--shape", self.shape),
            ("--graph", self.graph),
            ("--eager", self.eager),
            ("--strict-equal", self.strict_equal),
            ("--verify", self.verify),
            ("--save", self.save),
            ("--overwrite", self.overwrite),
            ("--cache-dump", self.cache_dump),
        ]
        return given + [flag for flag, value in more if value]
