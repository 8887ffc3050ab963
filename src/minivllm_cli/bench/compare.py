"""`bench --compare BASE NEW`: what differs between two saved runs, and what of it is noise. No torch."""

import math
import shlex
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from minivllm_cli.bench.compare_view import render_comparison, row_title
from minivllm_cli.bench.flags import BenchFlags, Format
from minivllm_cli.bench.saved import METRICS, SavedRow, SavedRun, more_repetitions, read_run
from minivllm_cli.bench.stats import FEWEST, interval_of_change
from minivllm_cli.command import Invocation
from minivllm_cli.console.streams import print_result
from minivllm_cli.errors import CliError, ExitCode, Problem
from minivllm_engine.core.escape import listed
from minivllm_engine.core.units import count_text, parse_fraction
from minivllm_engine.protocol.strict_json import dump_line

_HIGHER_IS_FASTER = ("tok_s",)


@dataclass(frozen=True, slots=True)
class Change:
    """A row of both runs. Figures are medians; `change` is new / base - 1.

    Attributes:
        interval: 95 %, of `change`; None for too few samples.
        slower: by so much, as a share; negative where the new run is faster.
    """

    row: SavedRow
    base: float
    new: float
    change: float
    interval: tuple[float, float] | None
    slower: float
    verdict: str


def run_compare(run: Invocation, flags: BenchFlags, output: Format) -> int:
    """Compare, print, and judge. Returns the exit code.

    Raises:
        CliError: a file, a flag, or two runs that cannot be compared.
    """
    assert flags.compare is not None
    if output not in (Format.TABLE, Format.MD, Format.JSON):
        raise CliError(f"--format {output}: a comparison is a table, md or json")
    metric, most = _metric(flags.metric), _share(flags.fail_if_slower)
    base_path, new_path = flags.compare
    base, new = read_run(base_path), read_run(new_path)
    for path, one in ((base_path, base), (new_path, new)):
        if not one.complete:
            run.console.warn(f"{path} was interrupted: it has some of its rows")
    _check_common((base_path, base), (new_path, new))
    _check_comparable(run, base, new, force=flags.force)
    changes = _changes(base, new, metric)
    if not changes:
        raise CliError(f"no row of both runs has {metric}", hint=f"--metric {METRICS[0]}")
    document = _document(base, new, metric, changes, [str(path) for path in flags.compare])
    if output is Format.JSON:
        print_result(dump_line(document).decode())
        for line in render_comparison(document, markdown=False).splitlines():
            run.console.note(line)
    else:
        print_result(render_comparison(document, markdown=output is Format.MD))
    if most is not None:
        _check_samples(changes, {base_path: base, new_path: new}, metric)
    return _judge(run, changes, most)


def _metric(name: str | None) -> str:
    if name is None:
        return METRICS[0]
    if name not in METRICS:
        near = get_close_matches(name, METRICS, n=1)
        raise CliError(
            f"--metric {name}: no such metric", hint=near[0] if near else ", ".join(METRICS)
        )
    return name


def _share(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        share = parse_fraction(text)
    except ValueError as error:
        raise CliError(f"--fail-if-slower: {error}") from None
    # Twice the time is 100 % slower. A bare number of 1 or more was hardly meant as a share.
    if "%" not in text and share >= 1:
        raise CliError(
            f"--fail-if-slower {text}: a share of 1 or more is written with its %",
            why=f"as a share it is {share:.0%}",
            hint=f"--fail-if-slower {text.strip()}%",
        )
    if not math.isfinite(share):
        raise CliError("--fail-if-slower: no run is slower by so much", hint="--fail-if-slower 3%")
    return share


def _check_common(*runs: tuple[Path, SavedRun]) -> None:
    """Refuse runs that share no row, which no `--force` makes comparable."""
    base, new = ({row.key for row in run.rows} for _, run in runs)
    if base & new:
        return
    has = (
        f"{path} has {listed((row_title(r.workload, r.variant) for r in run.rows), most=3)}"
        for path, run in runs
    )
    raise CliError("no row is in both runs: there is nothing to compare", why="\n".join(has))


def _check_comparable(run: Invocation, base: SavedRun, new: SavedRun, *, force: bool) -> None:
    differences = []
    gpus = [f"{one.device.kind} {one.device.name}" for one in (base, new)]
    if gpus[0] != gpus[1]:
        differences.append(f"GPU ({gpus[0]}, {gpus[1]})")
    if base.model.hash != new.model.hash:
        differences.append(f"model ({base.model.name}, {new.model.name})")
    left, right = ({row.key for row in one.rows} for one in (base, new))
    if left != right:
        differences.append(f"workload ({len(left - right)} and {len(right - left)} without a pair)")
    if not differences:
        return
    what = f"runs differ in {', '.join(differences)}"
    if not force:
        raise CliError(what, hint="--force")
    run.console.warn(what)


def _changes(base: SavedRun, new: SavedRun, metric: str) -> list[Change]:
    others = {row.key: row for row in new.rows}
    found = []
    for row in base.rows:
        other = others.get(row.key)
        if other is None:
            continue
        before, after = (
            [v for s in one.samples if (v := getattr(s, metric)) is not None]
            for one in (row, other)
        )
        if before and after and statistics.median(before) > 0 and min(before) > 0:
            found.append(_change(row, before, after, metric))
    return found


def _change(row: SavedRow, before: list[float], after: list[float], metric: str) -> Change:
    base, new = statistics.median(before), statistics.median(after)
    change = new / base - 1
    interval = interval_of_change(before, after)
    if metric in _HIGHER_IS_FASTER:
        slower = base / new - 1 if new else float("inf")
        better = change > 0
    else:
        slower, better = change, change < 0
    if interval is None:
        verdict = "too few"
    elif interval[0] <= 0 <= interval[1]:
        verdict = "within noise"
    else:
        verdict = "faster" if better else "slower"
    return Change(row, base, new, change, interval, slower, verdict)


def _check_samples(changes: list[Change], runs: Mapping[Path, SavedRun], metric: str) -> None:
    few = [change for change in changes if change.interval is None]
    if not few:
        return
    again = [
        f"minivllm {shlex.join(more_repetitions(one.argv, path, FEWEST))}"
        for path, one in runs.items()
        if one.argv and any(0 < row.num_samples(metric) < FEWEST for row in one.rows)
    ]
    raise CliError(
        "--fail-if-slower: too few samples to tell a change from noise in "
        f"{len(few)} of {count_text(len(changes), 'row')}",
        why=f"{FEWEST} are needed in both runs, so each --save with --reps {FEWEST} or more",
        hint=" && ".join(again) or f"minivllm bench --reps {FEWEST} --save FILE",
    )


def _document(
    base: SavedRun, new: SavedRun, metric: str, changes: list[Change], files: list[str]
) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "kind": "bench-comparison",
        "files": files,
        "metric": metric,
        "differs": {
            "config": _differing(_flat(base.config), _flat(new.config)),
            "env": _differing(_flat(base.env), _flat(new.env)),
        },
        "rows": [
            {
                "workload": change.row.workload,
                "variant": change.row.variant,
                "base": change.base,
                "new": change.new,
                "change": change.change,
                "interval": None if change.interval is None else list(change.interval),
                "verdict": change.verdict,
            }
            for change in changes
        ],
    }


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _differing(base: Mapping[str, Any], new: Mapping[str, Any]) -> list[list[Any]]:
    return [
        [key, base.get(key), new.get(key)]
        for key in {**base, **new}
        if base.get(key) != new.get(key)
    ]


def _judge(run: Invocation, changes: list[Change], most: float | None) -> ExitCode:
    if most is None:
        return ExitCode.OK
    slower = [c for c in changes if c.verdict == "slower" and c.slower > most]
    if not slower:
        return ExitCode.OK
    worst = max(slower, key=lambda c: c.slower)
    kind, batch = worst.row.workload.get("kind"), worst.row.workload.get("batch")
    run.console.error(
        Problem(
            f"slower by more than {most:.1%}: {len(slower)} of {count_text(len(changes), 'row')}",
            why=f"{kind} batch {batch} {worst.row.variant}: {worst.slower:.1%} slower",
        )
    )
    return ExitCode.CHECK_FAILED
