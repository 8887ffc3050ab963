"""What a run will do, worked out and checked before any weight is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minivllm_cli import engine_factory
from minivllm_cli.bench.arm import EAGER, GRAPH, Arm, arms_of
from minivllm_cli.bench.flags import BenchFlags
from minivllm_cli.bench.measuring import Times
from minivllm_cli.bench.options import SHAPING
from minivllm_cli.bench.sampling import decode_spare
from minivllm_cli.bench.workload import Workload, own_workloads, suite_workloads
from minivllm_cli.console import Console
from minivllm_cli.problems import CliError, ExitCode
from minivllm_cli.settings import Settings

if TYPE_CHECKING:
    from minivllm_engine.prepare import PreparedModel

_QUICK_REPS = 3
# What a step computes where nothing is set, on a CPU; more on a GPU, where less is spare.
_STEP_TOKENS = 2048
_DEFAULT_MODEL_LEN = 32 * 1024
NAIVE, KV_CACHE = Arm("naive", naive=True), Arm("kv cache")
FUSED, STAGE_GRAPH = Arm("+ fused"), Arm("+ graph", graph=True)
_REFERENCE_OPS = ("attention_backend", "gated_delta_prefill", "gated_delta_decode")


@dataclass(frozen=True)
class EngineRun:
    """One engine, and what is measured on it."""

    prepared: "PreparedModel"
    cases: tuple[tuple[Workload, tuple[Arm, ...]], ...]


@dataclass(frozen=True)
class BenchPlan:
    """A whole run. `settings` are those of the last engine, `skipped` says what does not fit."""

    settings: Settings
    engines: tuple[EngineRun, ...]
    times: Times
    percents: tuple[float, ...]
    skipped: tuple[str, ...]

    @property
    def prepared(self) -> "PreparedModel":
        return self.engines[-1].prepared

    @property
    def num_samples(self) -> int:
        """Samples of all arms, warm-ups included."""
        arms = sum(len(arms) for engine in self.engines for _, arms in engine.cases)
        return arms * (self.times.reps + self.times.warmup)


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
    times = Times(reps, options.warmup)
    settings = _sized(settings, workloads)
    if flags.eager and not flags.graph and "graph.enabled" not in settings.entries:
        settings = settings.with_value("graph.enabled", False)
    prepared = _prepare(settings, flags)
    arms = _arms(prepared, flags)
    kept, skipped = _fitting(prepared, workloads, is_suite=is_suite)
    if is_suite and options.suite == "stages":
        engines = _stages(settings, flags, prepared, kept, arms)
    else:
        engines = [EngineRun(prepared, tuple((w, arms_of(w, arms)) for w in kept))]
    return BenchPlan(settings, tuple(engines), times, options.percentiles, tuple(skipped))


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
                hint="--workload decode",
            )
        console.note(f"{path} ({settings.source(path)}) has no part in the suite {options.suite}")
    return suite_workloads(options.suite), True


def _is_typed(settings: Settings, path: str) -> bool:
    return settings.source(path).startswith("--")


def _sized(settings: Settings, workloads: Sequence[Workload]) -> Settings:
    """As many sequences as the largest batch, and room for the longest, where nothing is set."""
    if "engine.max_num_seqs" not in settings.entries:
        settings = settings.with_value("engine.max_num_seqs", max(w.batch for w in workloads))
    step = settings.get("engine.max_num_batched_tokens") or _STEP_TOKENS
    longest = max(_needed(workload, step) for workload in workloads)
    own = settings.bench.workload is not None
    if own and longest > _DEFAULT_MODEL_LEN and "engine.max_model_len" not in settings.entries:
        settings = settings.with_value("engine.max_model_len", longest)
    return settings


def _needed(workload: Workload, step_tokens: int) -> int:
    """Longest sequence that a workload makes of a request."""
    spare = decode_spare(workload, step_tokens) if workload.kind == "decode" else 0
    return workload.longest + spare


def _prepare(settings: Settings, flags: BenchFlags) -> "PreparedModel":
    if flags.shape is not None:
        return engine_factory.prepare_shape(str(flags.shape), settings)
    return engine_factory.prepare_model(settings, "bench")


def _arms(prepared: "PreparedModel", flags: BenchFlags) -> tuple[Arm, ...]:
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


def _fitting(
    prepared: "PreparedModel", workloads: Sequence[Workload], *, is_suite: bool
) -> tuple[list[Workload], list[str]]:
    """The workloads that fit, and why others do not. Of what was asked for itself, all must."""
    kept, skipped = [], []
    for workload in workloads:
        problem = _misfit(prepared, workload)
        if problem is None:
            kept.append(workload)
        elif is_suite:
            why = f": {problem.problems[0].why}" if problem.problems[0].why else ""
            skipped.append(f"skipped {problem.problems[0].what}{why}")
        else:
            raise problem
    if not kept:
        raise CliError("nothing of this suite fits", why="\n".join(skipped))
    return kept, skipped


def _misfit(prepared: "PreparedModel", workload: Workload) -> CliError | None:
    plan, batch = prepared.plan, workload.batch
    name = f"{workload.title}, batch {batch}"
    needed = _needed(workload, plan.max_num_batched_tokens)
    if needed > plan.max_model_len:
        most = prepared.model_config.max_position_embeddings
        return CliError(
            f"{name}: up to {needed:,} tokens a request",
            why=f"max_model_len is {plan.max_model_len:,}; the model's positions end at {most:,}",
            hint=_shorter(workload, needed - plan.max_model_len),
        )
    if batch > plan.max_num_seqs:
        return CliError(
            f"{name}: {batch} sequences at once",
            why=f"max_num_seqs is {plan.max_num_seqs}",
            hint=f"--batch {plan.max_num_seqs}",
        )
    if not workload.times_decode:
        return None
    if batch > plan.max_num_batched_tokens:
        return CliError(
            f"{name}: a decode step has {batch} tokens",
            why=f"max_num_batched_tokens is {plan.max_num_batched_tokens}",
            hint=f"--set engine.max_num_batched_tokens={batch}",
        )
    each = -(-needed // plan.block_size)
    if batch * each > plan.num_blocks:
        return DoesNotFit(
            f"{name}: {batch * each:,} KV blocks",
            why=f"there are {plan.num_blocks:,}, and all requests run side by side",
            hint=f"--batch {max(plan.num_blocks // each, 1)}, or a smaller --depth",
        )
    return None


def _shorter(workload: Workload, by: int) -> str:
    """What would do instead of requests that are longer `by` so many tokens."""
    parts = [("depth", workload.depth), ("prompt-len", workload.prompt.high)]
    for name, tokens in (*parts, ("gen-len", workload.gen.high)):
        if tokens > by:
            return f"--{name} {tokens - by}"
    return "shorter requests"


class DoesNotFit(CliError):
    """A workload needs more memory than there is."""

    exit_code = ExitCode.DOES_NOT_FIT


def _stages(
    settings: Settings,
    flags: BenchFlags,
    prepared: "PreparedModel",
    workloads: Sequence[Workload],
    arms: tuple[Arm, ...],
) -> list[EngineRun]:
    """From computing everything again to graphs. Without CUDA, reference operations are all there are."""
    if prepared.config.engine.device != "cuda":
        return [EngineRun(prepared, tuple((w, (NAIVE, KV_CACHE)) for w in workloads))]
    plain = settings.with_value("graph.enabled", False)
    for key in _REFERENCE_OPS:
        plain = plain.with_value(f"engine.{key}", "reference")
    fused = (FUSED, STAGE_GRAPH) if GRAPH in arms else (FUSED,)
    return [
        EngineRun(_prepare(plain, flags), tuple((w, (NAIVE, KV_CACHE)) for w in workloads)),
        EngineRun(prepared, tuple((w, fused) for w in workloads)),
    ]
