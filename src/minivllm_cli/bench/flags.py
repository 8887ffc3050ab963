"""The options of `bench`, and which of them go together."""

from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm_cli.config.flags import OptionGroup, cache_dump_flag, flag, switch
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
_WHAT, _HOW, _OUT, _COMPARING = "What is measured", "How", "Results", "Comparing two saved runs"


@dataclass(frozen=True)
class BenchFlags(OptionGroup):
    """What only `bench` takes."""

    suite: str | None = flag("Rows that go together; standard", key="bench.suite", panel=_WHAT)
    workload: str | None = flag(
        "prefill, decode, mixed, prefix or jsonl:FILE", key="bench.workload", metavar="KIND"
    )
    batch: str | None = flag("Requests at once: 1,8,64", key="bench.batch")
    prompt_len: str | None = flag("Tokens of a prompt; 100~1024 draws them", key="bench.prompt_len")
    gen_len: str | None = flag("Tokens of an answer", key="bench.gen_len")
    depth: str | None = flag(
        "decode: tokens in the cache before timing starts; prefix: tokens that are shared",
        key="bench.depth",
    )
    num_prompts: str | None = flag(
        "Requests of a row, as many as --batch if nothing is said", key="bench.num_prompts"
    )
    groups: str | None = flag("prefix: different prefixes that are shared", key="bench.groups")
    shape: Shape | None = flag("Random weights of that shape instead of MODEL")
    graph: bool = switch("Decode with CUDA graphs; needs CUDA", panel=_HOW)
    eager: bool = switch("Decode without; with CUDA both are the default")
    reps: str | None = flag("Repetitions of each row", key="bench.reps")
    warmup: str | None = flag("Untimed ones before", key="bench.warmup")
    percentiles: str | None = flag("Of latencies", key="bench.percentiles")
    strict_equal: bool = switch("Exit 5 where variants give other tokens")
    verify: int | None = flag(
        "Answer every Nth request that reused a prefix again from nothing, and compare", metavar="N"
    )
    format: Format | None = flag("How rows are written; table", panel=_OUT)
    json_: bool = switch("As --format json; the table moves to stderr")
    save: Path | None = flag("Write the JSON document to FILE", metavar="FILE")
    overwrite: bool = switch("Replace the FILE of --save if it is there")
    help_metrics: bool = switch("Say what each figure means and leave")
    compare: tuple[Path, Path] | None = flag(
        "Files of --save", metavar="BASE NEW", panel=_COMPARING
    )
    fail_if_slower: str | None = flag(
        "Exit 5 if a row is slower by more than, say, 3%, and it is not noise", metavar="SHARE"
    )
    metric: Metric | None = flag("What is compared; tok_s")
    force: bool = switch("Compare runs of other GPUs or models")
    cache_dump: Path | None = cache_dump_flag()

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
                    typed = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
                    raise CliError(f"{typed} measures, and --compare only reads two saved runs")
            return
        for name in _ONLY_COMPARE:
            if getattr(self, name) not in (None, False):
                typed = f"--{name.replace('_', '-')}"
                raise CliError(f"{typed} goes with --compare", hint="--compare BASE NEW")
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
