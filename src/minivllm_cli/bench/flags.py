"""The options of `bench`, and which of them go together."""

from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from minivllm_cli.config.flags import CacheDumpOption, OptionGroup
from minivllm_cli.errors import CliError
from minivllm_engine.model_config.shapes import SHAPES

if TYPE_CHECKING:
    from minivllm_cli.config.settings import Settings


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


class Metric(StrEnum):
    """What of a sample is compared."""

    TOK_S = "tok_s"
    WALL_S = "wall_s"
    ITL_MS = "itl_ms"
    TTFT_MS = "ttft_ms"
    QUEUE_MS = "queue_ms"
    TPOT_MS = "tpot_ms"
    E2E_MS = "e2e_ms"


Shape = StrEnum("Shape", {f"B{name}": name for name in SHAPES})  # type: ignore[misc]

_UNREAD = {"chat", "sampling"}
_ONLY_COMPARE = ("fail_if_slower", "metric", "force")
_COMPARE = (*_ONLY_COMPARE, "compare", "format", "json_")
_KEYS = (
    *("suite", "workload", "batch", "prompt_len", "gen_len", "depth", "num_prompts", "groups"),
    *("reps", "warmup", "percentiles"),
)


def _option(panel: str, name: str, metavar: str | None, help: str) -> Any:
    key = name.removeprefix("--").replace("-", "_")
    if key in _KEYS:
        help += f"  [bench.{key}]"
    return typer.Option(name, help=help, metavar=metavar, show_default=False, rich_help_panel=panel)


_what = partial(_option, "What is measured")
_how = partial(_option, "How")
_out = partial(_option, "Results")
_comparing = partial(_option, "Comparing two saved runs")


@dataclass(frozen=True)
class BenchFlags(OptionGroup):
    """What only `bench` takes."""

    config_paths: ClassVar[dict[str, str]] = {key: f"bench.{key}" for key in _KEYS}

    suite: Annotated[Suite | None, _what("--suite", None, "Rows that go together; standard")] = None
    workload: Annotated[
        str | None, _what("--workload", "KIND", "prefill, decode, mixed, prefix or jsonl:FILE")
    ] = None
    batch: Annotated[str | None, _what("--batch", "LIST", "Requests at once: 1,8,64")] = None
    prompt_len: Annotated[
        str | None, _what("--prompt-len", "LIST", "Tokens of a prompt; 100~1024 draws them")
    ] = None
    gen_len: Annotated[str | None, _what("--gen-len", "LIST", "Tokens of an answer")] = None
    depth: Annotated[
        str | None,
        _what(
            "--depth",
            "LIST",
            "decode: tokens in the cache before timing starts; prefix: tokens that are shared",
        ),
    ] = None
    num_prompts: Annotated[
        str | None,
        _what("--num-prompts", "N", "Requests of a row, as many as --batch if nothing is said"),
    ] = None
    groups: Annotated[
        str | None, _what("--groups", "N", "prefix: different prefixes that are shared")
    ] = None
    shape: Annotated[
        Shape | None, _what("--shape", None, "Random weights of that shape instead of MODEL")
    ] = None
    graph: Annotated[bool, _how("--graph", None, "Decode with CUDA graphs; needs CUDA")] = False
    eager: Annotated[
        bool, _how("--eager", None, "Decode without; with CUDA both are the default")
    ] = False
    reps: Annotated[str | None, _how("--reps", "N", "Repetitions of each row")] = None
    warmup: Annotated[str | None, _how("--warmup", "N", "Untimed ones before")] = None
    percentiles: Annotated[str | None, _how("--percentiles", "LIST", "Of latencies")] = None
    strict_equal: Annotated[
        bool, _how("--strict-equal", None, "Exit 5 where variants give other tokens")
    ] = False
    verify: Annotated[
        int | None,
        _how(
            "--verify",
            "N",
            "Answer every Nth request that reused a prefix again from nothing, and compare",
        ),
    ] = None
    format: Annotated[Format | None, _out("--format", None, "How rows are written; table")] = None
    json_: Annotated[bool, _out("--json", None, "As --format json; the table moves to stderr")] = (
        False
    )
    save: Annotated[Path | None, _out("--save", "FILE", "Write the JSON document to FILE")] = None
    overwrite: Annotated[
        bool, _out("--overwrite", None, "Replace the FILE of --save if it is there")
    ] = False
    help_metrics: Annotated[
        bool, _out("--help-metrics", None, "Say what each figure means and leave")
    ] = False
    cache_dump: CacheDumpOption = None
    compare: Annotated[
        tuple[Path, Path] | None, _comparing("--compare", "BASE NEW", "Files of --save")
    ] = None
    fail_if_slower: Annotated[
        str | None,
        _comparing(
            "--fail-if-slower",
            "SHARE",
            "Exit 5 if a row is slower by more than, say, 3%, and it is not noise",
        ),
    ] = None
    metric: Annotated[Metric | None, _comparing("--metric", None, "What is compared; tok_s")] = None
    force: Annotated[bool, _comparing("--force", None, "Compare runs of other GPUs or models")] = (
        False
    )

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
        if self.compare is not None:
            for name, value in (
                ("model", model),
                *((f.name, getattr(self, f.name)) for f in fields(self)),
            ):
                if name not in _COMPARE and value not in (None, False):
                    flag = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
                    raise CliError(f"{flag} measures, and --compare only reads two saved runs")
            return
        for name in _ONLY_COMPARE:
            if getattr(self, name) not in (None, False):
                flag = f"--{name.replace('_', '-')}"
                raise CliError(f"{flag} goes with --compare", hint="--compare BASE NEW")
        if self.verify is not None and self.verify < 1:
            raise CliError(f"--verify {self.verify}: should be at least 1")
        if self.overwrite and self.save is None:
            raise CliError("--overwrite goes with --save", hint="--save FILE")
        if self.shape is not None and model is not None:
            raise CliError("MODEL and --shape exclude each other", hint="one of them")


def check_keys(settings: "Settings", flags: BenchFlags) -> None:
    """Refuse keys that were typed, and that this run does not read. In files they are for other commands.

    Raises:
        CliError: which.
    """
    is_file = (settings.bench.workload or "").startswith("jsonl:")
    is_suite = settings.source("bench.suite").startswith("--")
    unread = {"chat"} if is_file and not is_suite else _UNREAD
    for path, entry in settings.entries.items():
        section, source = path.partition(".")[0], entry.source
        if not source.startswith("--"):
            continue
        if flags.compare is not None and section != "output":
            raise CliError(f"{source} measures, and --compare only reads two saved runs")
        if flags.shape is not None and section == "model":
            raise CliError(f"{source} and --shape exclude each other", hint="one of them")
        if flags.compare is None and section in unread:
            raise CliError(
                f"{source}: bench does not read {path}",
                why="prompts of its own are answered greedily, to the length that is set"
                if section == "sampling"
                else None,
                hint=f"leave out {source}",
            )
