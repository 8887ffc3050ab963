"""What a row measures: kinds of workloads, the suites made of them, and what they need of an engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from minivllm_cli.config.bench_options import BenchOptions, Length, as_length
from minivllm_cli.errors import CliError

Kind = Literal["prefill", "decode", "mixed", "prefix", "jsonl", "stages"]

# What each kind reads of the keys in options.SHAPING.
USES: Mapping[str, tuple[str, ...]] = {
    "prefill": ("batch", "prompt_len", "num_prompts"),
    "decode": ("batch", "gen_len", "depth"),
    "mixed": ("batch", "prompt_len", "gen_len", "num_prompts"),
    "prefix": ("batch", "prompt_len", "gen_len", "depth", "num_prompts", "groups"),
    "jsonl": ("batch", "num_prompts"),
}
# What tells a row from others of its kind and batch; of `jsonl` also num_prompts, where there is a limit.
IDENTITY: Mapping[str, tuple[str, ...]] = {
    "prefill": ("prompt_len", "num_prompts"),
    "decode": ("depth", "gen_len"),
    "stages": ("depth", "gen_len"),
    "mixed": ("prompt_len", "num_prompts", "gen_len"),
    "prefix": ("depth", "prompt_len", "num_prompts", "gen_len", "groups"),
    "jsonl": ("file",),
}
_LABELS = {"prompt_len": "prompt", "gen_len": "gen", "num_prompts": "requests"}
# The request of one token more than a warm prefix needs, and what follows it.
_PREFIX_DEFAULTS: Mapping[str, Any] = {"prompt_len": (64,), "gen_len": (16,), "depth": (512,)}


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a row. All variants of it get the same ones.

    Attributes:
        batch: requests that run at once, at most; of `decode` and `stages` all the time.
        prompt: tokens of each prompt, after the shared prefix if there is one.
        gen: tokens of each answer; of `decode` and `stages` those that are timed.
        depth: tokens in the cache when timing starts; of `prefix` those that a group shares.
        num_prompts: requests in all; of `jsonl` at most, 0 for every line.
        groups: of `prefix`.
        with_and_without_cache: each variant runs twice, reusing prefixes and not.
        file: of `jsonl`.
    """

    kind: Kind
    batch: int
    prompt: Length = Length(0, 0)
    gen: Length = Length(1, 1)
    depth: int = 0
    num_prompts: int = 1
    groups: int = 0
    with_and_without_cache: bool = False
    file: str | None = None

    @property
    def times_decode(self) -> bool:
        """Whether decode steps alone are timed."""
        return self.kind in ("decode", "stages")

    @property
    def reuses_prefixes(self) -> bool:
        """Whether requests can begin alike: random ones of their own never do."""
        return self.kind in ("prefix", "jsonl")

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and answer together; 0 where only a file knows."""
        if self.kind == "jsonl":
            return 0
        if self.times_decode:
            return max(self.depth, 1) + self.gen.high + 1
        return self.depth + self.prompt.high + self.gen.high

    def document(self) -> dict[str, Any]:
        """Write what says which row this is, in JSON and in a comparison."""
        values: dict[str, Any] = {
            "depth": self.depth,
            "prompt_len": _plain(self.prompt),
            "num_prompts": self.num_prompts,
            "gen_len": _plain(self.gen),
            "groups": self.groups,
            "file": self.file,
        }
        limited = self.kind == "jsonl" and self.num_prompts
        keys = (*IDENTITY[self.kind], *(("num_prompts",) if limited else ()))
        return {"kind": self.kind, "batch": self.batch} | {key: values[key] for key in keys}

    @property
    def title(self) -> str:
        """As `workload_title`."""
        return workload_title(self.document())


def workload_title(document: Mapping[str, Any]) -> str:
    """Name what rows of a table have in common, but for the batch: "decode · depth 4 · gen 8"."""
    parts = [str(document["kind"])]
    for name, value in document.items():
        if name not in ("kind", "batch") and (name, value) != ("num_prompts", document["batch"]):
            shown = f"{value:,}" if isinstance(value, int) else str(value)
            parts.append(f"{_LABELS.get(name, name)} {shown}")
    return " · ".join(parts)


def _plain(length: Length) -> int | str:
    return length.low if length.low == length.high else str(length)


def suite_workloads(name: str) -> list[Workload]:
    """List the rows of a suite; `quick` makes 3 repetitions where nothing is set."""
    prefills = [_prefill(512), _prefill(2048)]
    decodes = [_decode(1, 128, 512), _decode(8, 128, 512)]
    match name:
        case "quick":
            return [_decode(1, 32, 0)]
        case "standard":
            return prefills + decodes
        case "long":
            deep = [_decode(1, 128, 8192), _decode(8, 128, 8192)]
            return prefills + decodes + [_decode(64, 128, 512)] + deep + _prefixes()
        case "stages":
            return [Workload("stages", 1, gen=Length(64, 64), depth=128)]
        case "prefix":
            return _prefixes()
    raise AssertionError(name)


def _prefill(length: int) -> Workload:
    return Workload("prefill", 1, prompt=Length(length, length))


def _decode(batch: int, gen: int, depth: int) -> Workload:
    return Workload("decode", batch, gen=Length(gen, gen), depth=depth, num_prompts=batch)


def _prefixes() -> list[Workload]:
    """One long prefix, asked again; groups that share; and prompts that share nothing, for the cost."""

    def rows(kind: Kind, batch: int, prompt: int, gen: int, **more: int) -> Workload:
        lengths = {"prompt": Length(prompt, prompt), "gen": Length(gen, gen)}
        return Workload(kind, batch, **lengths, **more, with_and_without_cache=True)  # type: ignore[arg-type]

    return [
        rows("prefix", 1, 64, 16, depth=2048, num_prompts=1, groups=1),
        rows("prefix", 8, 64, 16, depth=512, num_prompts=16, groups=2),
        rows("mixed", 8, 256, 16, num_prompts=16),
    ]


def own_workloads(options: BenchOptions, is_set: Sequence[str]) -> list[Workload]:
    """List the rows of `--workload`: one for each combination of the lists.

    Args:
        is_set: the keys of SHAPING that somebody set; others have defaults that depend on the kind.

    Raises:
        CliError: a key is set that this kind does not use, or values that cannot be.
    """
    assert options.workload is not None
    kind, _, file = options.workload.partition(":")
    for key in is_set:
        if key not in USES[kind]:
            raise CliError(
                f"bench.{key} is nothing that the workload {kind} has",
                hint=f"it has {', '.join(USES[kind])}",
            )
    if kind == "prefix":
        ours = {key: value for key, value in _PREFIX_DEFAULTS.items() if key not in is_set}
        options = options.model_copy(update=ours)
    if kind == "jsonl":
        most = options.num_prompts or 0
        return [Workload("jsonl", batch, num_prompts=most, file=file) for batch in options.batch]
    lists = [
        getattr(options, key) if key in USES[kind] else (None,)
        for key in ("depth", "prompt_len", "gen_len", "batch")
    ]
    return [_row(kind, options, *choice) for choice in product(*lists)]


def _row(
    kind: Any,
    options: BenchOptions,
    depth: int | None,
    prompt: int | str | None,
    gen: int | str | None,
    batch: int,
) -> Workload:
    if kind == "prefix" and not depth:
        raise CliError(
            "bench.depth 0: the workload prefix shares that many tokens", hint="--depth 64"
        )
    if kind == "decode" and isinstance(gen, str):
        raise CliError(
            f"bench.gen_len {gen}: the answers of decode have one length",
            why="its requests run side by side all the time; those of mixed may differ",
        )
    return Workload(
        kind,
        batch,
        prompt=Length(0, 0) if prompt is None else as_length(prompt),
        gen=Length(1, 1) if gen is None else as_length(gen),
        depth=depth or 0,
        num_prompts=batch if kind == "decode" else options.num_prompts or batch,
        groups=options.groups if kind == "prefix" else 0,
        with_and_without_cache=kind == "prefix",
    )
