"""What a run will do, worked out and checked before any weight is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minivllm_cli import engine
from minivllm_cli.bench.fitting import Misfit, misfit, sized
from minivllm_cli.bench.flags import BenchFlags
from minivllm_cli.bench.preflight import check_uses
from minivllm_cli.bench.smaller_rows import TooLarge
from minivllm_cli.bench.variant import EAGER, GRAPH, Variant, variants_of
from minivllm_cli.bench.workload import Workload, own_workloads, suite_workloads
from minivllm_cli.config.bench_options import SHAPING
from minivllm_cli.config.settings import Settings
from minivllm_cli.console.streams import Console
from minivllm_cli.errors import CliError
from minivllm_engine.core.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from minivllm_engine.engine.prepare import PreparedModel

_QUICK_REPS = 3
# Workloads to propose, the one that is wanted most often first.
_BY_USE = ("decode", "prefill", "mixed", "prefix")
NAIVE, KV_CACHE = Variant("naive", naive=True), Variant("kv cache")
FUSED, STAGE_GRAPH = Variant("+ fused"), Variant("+ graph", graph=True)
_REFERENCE_OPS = ("attention_backend", "gated_delta_prefill", "gated_delta_decode")


@dataclass(frozen=True)
class EngineRun:
    """One engine, and what is measured on it."""

    prepared: "PreparedModel"
    cases: tuple[tuple[Workload, tuple[Variant, ...]], ...]


@dataclass(frozen=True)
class BenchPlan:
    """A whole run. `settings` are those of the last engine, `skipped` says what does not fit."""

    settings: Settings
    engines: tuple[EngineRun, ...]
    reps: int
    warmup: int
    percents: tuple[float, ...]
    skipped: tuple[str, ...]

    @property
    def prepared(self) -> "PreparedModel":
        return self.engines[-1].prepared

    @property
    def num_rows(self) -> int:
        return sum(len(variants) for engine in self.engines for _, variants in engine.cases)


def make_plan(settings: Settings, flags: BenchFlags, console: Console) -> BenchPlan:
    """Decide what is measured, and refuse what cannot be.

    Raises:
        CliError, EngineError: a mistake in settings, model or device; or a workload does not fit.
    """
    options = settings.bench
    workloads, is_suite = _workloads(settings, console)
    reps = options.reps
    if is_suite and options.suite == "quick" and "bench.reps" not in settings.entries:
        reps = _QUICK_REPS
    if flags.eager and not flags.graph and "graph.enabled" not in settings.entries:
        settings = settings.with_value("graph.enabled", False)
    prepared = _prepared_for(settings, flags, workloads, is_suite=is_suite)
    variants = _variants(prepared, flags)
    kept, misfits = _fitting(prepared, workloads)
    if misfits and not is_suite:
        error = _too_large(settings, flags, workloads).error()
        raise error or CliError(misfits[0].what, why=misfits[0].why)
    skipped = tuple(f"skipped {one.what}: {one.why}" for one in misfits)
    if not kept:
        raise CliError("nothing of this suite fits", why="\n".join(skipped))
    settings = sized(settings, workloads, None)
    if is_suite and options.suite == "stages":
        engines = _stages(settings, flags, prepared, kept, variants)
    else:
        engines = [EngineRun(prepared, tuple((w, variants_of(w, variants)) for w in kept))]
    cases = [case for engine in engines for case in engine.cases]
    check_uses(settings, flags, prepared, cases, is_suite=is_suite)
    return BenchPlan(settings, tuple(engines), reps, options.warmup, options.percentiles, skipped)


def _workloads(settings: Settings, console: Console) -> tuple[list[Workload], bool]:
    """The rows, and whether they are a suite's."""
    options = settings.bench
    is_set = [key for key in SHAPING if f"bench.{key}" in settings.entries]
    both = [f"bench.{key}" for key in ("suite", "workload") if f"bench.{key}" in settings.entries]
    typed = [path for path in both if _is_typed(settings, path)]
    if len(typed) == 2 or (len(both) == 2 and not typed):
        sources = " and ".join(settings.source(path) for path in both)
        raise CliError(
            f"bench.suite and bench.workload exclude each other ({sources})",
            why="a suite has its own workloads",
        )
    if options.workload is not None and typed != ["bench.suite"]:
        return own_workloads(options, is_set), False
    for key in is_set:
        path = f"bench.{key}"
        if _is_typed(settings, path):
            raise CliError(
                f"{settings.source(path)}: the suite {options.suite} has its own workloads",
                hint=_without_suite(settings, is_set),
            )
        console.note(f"{path} ({settings.source(path)}) has no part in the suite {options.suite}")
    return suite_workloads(options.suite), True


def _without_suite(settings: Settings, is_set: Sequence[str]) -> str:
    """What to type where keys of a workload stand beside a suite: a workload that has them, or less."""
    typed = [settings.source(f"bench.{k}") for k in is_set if _is_typed(settings, f"bench.{k}")]
    less = f"leave out {' and '.join(typed)}"
    kind = next((kind for kind in _BY_USE if _has(kind, settings, is_set)), None)
    return less if kind is None else f"--workload {kind} in place of the suite, or {less}"


def _has(kind: str, settings: Settings, is_set: Sequence[str]) -> bool:
    try:
        own_workloads(settings.bench.model_copy(update={"workload": kind}), is_set)
    except CliError:
        return False
    return True


def _is_typed(settings: Settings, path: str) -> bool:
    return settings.source(path).startswith("--")


def _prepare(settings: Settings, flags: BenchFlags) -> "PreparedModel":
    if flags.shape is not None:
        return engine.prepare_shape(str(flags.shape), settings)
    return engine.prepare_model(settings)


def _variants(prepared: "PreparedModel", flags: BenchFlags) -> tuple[Variant, ...]:
    device, enabled = prepared.config.engine.device, prepared.config.graph.enabled
    if flags.graph and device != "cuda":
        raise CliError(
            f"--graph needs CUDA; this run uses {device}", hint="drop --graph, or --device cuda"
        )
    if flags.graph and enabled is False:
        raise CliError("--graph, but graph.enabled is false", hint="--set graph.enabled=true")
    can_capture = prepared.config.engine.can_capture
    if flags.graph and not can_capture:
        raise CliError(
            "--graph, but reference operations cannot be captured",
            hint="--set engine.attention_backend=auto --set engine.gated_delta_decode=auto",
        )
    has_graphs = device == "cuda" and enabled is not False and can_capture
    if flags.graph != flags.eager:
        return (GRAPH,) if flags.graph else (EAGER,)
    return (EAGER, GRAPH) if has_graphs else (EAGER,)


def _prepared_for(
    settings: Settings, flags: BenchFlags, workloads: Sequence[Workload], *, is_suite: bool
) -> "PreparedModel":
    """An engine for the rows.

    Raises:
        CliError, EngineError: there can be none; of rows, what smaller ones there could be.
    """
    try:
        return _prepare(sized(settings, workloads, None), flags)
    except (CapacityError, ConfigError) as refused:
        error = None if is_suite else _too_large(settings, flags, workloads).error()
        # Sizes that were chosen for the rows are not to be told as if somebody had set them.
        chosen = [
            k for k in ("max_num_seqs", "max_model_len") if f"engine.{k}" not in settings.entries
        ]
        of_rows = any(key in refused.what for key in chosen)
        if error is None or (error.problems[0].hint is None and not of_rows):
            raise
        raise error from None


def _too_large(settings: Settings, flags: BenchFlags, workloads: Sequence[Workload]) -> TooLarge:
    shape = None if flags.shape is None else str(flags.shape)
    return TooLarge(settings, workloads, engine.make_planner(settings, shape))


def _fitting(
    prepared: "PreparedModel", workloads: Sequence[Workload]
) -> tuple[list[Workload], list[Misfit]]:
    """The workloads that fit, and why others do not."""
    positions = prepared.model_config.max_position_embeddings
    found = [(workload, misfit(prepared.plan, positions, workload)) for workload in workloads]
    kept = [workload for workload, problem in found if problem is None]
    return kept, [problem for _, problem in found if problem is not None]


def _stages(
    settings: Settings,
    flags: BenchFlags,
    prepared: "PreparedModel",
    workloads: Sequence[Workload],
    variants: tuple[Variant, ...],
) -> list[EngineRun]:
    """From computing everything again to graphs. Without CUDA, reference operations are all there are."""
    if prepared.config.engine.device != "cuda":
        return [EngineRun(prepared, tuple((w, (NAIVE, KV_CACHE)) for w in workloads))]
    plain = settings.with_value("graph.enabled", False)
    for key in _REFERENCE_OPS:
        plain = plain.with_value(f"engine.{key}", "reference")
    fused = (FUSED, STAGE_GRAPH) if GRAPH in variants else (FUSED,)
    return [
        EngineRun(_prepare(plain, flags), tuple((w, (NAIVE, KV_CACHE)) for w in workloads)),
        EngineRun(prepared, tuple((w, fused) for w in workloads)),
    ]
