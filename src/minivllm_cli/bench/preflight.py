"""Checks that would check nothing are refused before any weight is loaded: `--verify`, `--strict-equal`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from minivllm_cli.bench.fitting import misfit
from minivllm_cli.bench.flags import BenchFlags
from minivllm_cli.bench.requests import BenchRequest
from minivllm_cli.bench.smaller_rows import option_text
from minivllm_cli.bench.variant import Variant
from minivllm_cli.bench.workload import Workload, own_workloads
from minivllm_cli.config.bench_options import SHAPING
from minivllm_cli.config.settings import Settings
from minivllm_cli.errors import CliError
from minivllm_engine.core.snapshot_interval import snapshot_interval
from minivllm_engine.core.units import count_text

if TYPE_CHECKING:
    from minivllm_engine.engine.prepare import PreparedModel

Cases = Sequence[tuple[Workload, tuple[Variant, ...]]]


def check_uses(
    settings: Settings,
    flags: BenchFlags,
    prepared: "PreparedModel",
    cases: Cases,
    *,
    is_suite: bool,
) -> None:
    """Refuse checks that the rows give nothing to do.

    Raises:
        CliError: which, why, and what they are for.
    """
    if flags.verify is not None:
        _check_verify(settings, prepared, [workload for workload, _ in cases], is_suite=is_suite)
    variants: dict[Workload, list[str]] = {}
    for workload, each in cases:
        variants.setdefault(workload, []).extend(variant.name for variant in each)
    if flags.strict_equal and max(map(len, variants.values())) < 2:
        device = prepared.config.engine.device
        instead = "--suite prefix" if is_suite else "--workload prefix"
        raise CliError(
            "--strict-equal has nothing to do: there are no two variants to compare",
            why=f"every workload runs in one variant alone, {cases[0][1][0].name}",
            hint=f"{'--graph --eager' if device == 'cuda' else instead}, or leave out --strict-equal",
        )


def check_lines(
    flags: BenchFlags, prepared: "PreparedModel", lines: Mapping[Workload, Sequence[BenchRequest]]
) -> None:
    """Check as `check_uses` does what only the lines of a file tell.

    Raises:
        CliError: no line is long enough to reuse anything.
    """
    lengths = [len(request.prompt_ids) for each in lines.values() for request in each]
    interval = snapshot_interval(prepared.plan.block_size)
    # A prompt's last token is computed in any case.
    if flags.verify is not None and lengths and max(lengths) <= interval:
        longest = count_text(max(lengths), "token")
        raise _nothing_to_verify(
            f"reuse comes in units of {interval:,} tokens, and the longest prompt has {longest}",
            None,
        )


def _nothing_to_verify(why: str, instead: str | None) -> CliError:
    return CliError(
        "--verify has nothing to do: no request reuses a prefix",
        why=why,
        hint=f"{instead}, or leave out --verify" if instead else "leave out --verify",
    )


def _check_verify(
    settings: Settings, prepared: "PreparedModel", workloads: Sequence[Workload], *, is_suite: bool
) -> None:
    plan, interval = prepared.plan, snapshot_interval(prepared.plan.block_size)
    if not plan.prefix_cache:
        raise _nothing_to_verify("cache.prefix_cache is false", "--set cache.prefix_cache=true")
    if not plan.num_snapshots:
        raise _nothing_to_verify("the prefix cache has no room for a state snapshot", None)
    reusing = [workload for workload in workloads if workload.reuses_prefixes]
    if any(workload.kind != "prefix" or workload.depth >= interval for workload in reusing):
        return
    if reusing:
        shared = count_text(max(workload.depth for workload in reusing), "token")
        why = f"reuse comes in units of {interval:,} tokens, and the prefixes that are shared have {shared}"
    else:
        kinds = " and ".join(dict.fromkeys(workload.kind for workload in workloads))
        why = f"prompts of {kinds} are random: none begins as another does"
    if is_suite:
        raise _nothing_to_verify(why, None if reusing else "--suite prefix")
    raise _nothing_to_verify(why, _shared_prefixes(settings, prepared, interval))


def _shared_prefixes(settings: Settings, prepared: "PreparedModel", interval: int) -> str | None:
    """Options for rows that reuse prefixes and fit; None without any."""
    options = []
    if settings.bench.workload != "prefix":
        options.append(option_text(settings, "workload", "prefix"))
    changes: dict[str, object] = {"workload": "prefix"}
    is_set = [key for key in SHAPING if f"bench.{key}" in settings.entries]
    depths = settings.bench.depth
    if "depth" in is_set and (max(depths) < interval or 0 in depths):
        options.append(option_text(settings, "depth", str(interval)))
        changes["depth"] = (interval,)
    rows = own_workloads(settings.bench.model_copy(update=changes), is_set)
    positions = prepared.model_config.max_position_embeddings
    if any(misfit(prepared.plan, positions, row) for row in rows):
        return None
    return " ".join(options)
