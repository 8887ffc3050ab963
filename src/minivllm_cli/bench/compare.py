"""`bench --compare BASE NEW`: what differs between two saved runs, and what of it is noise. No torch."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm_cli.bench.flags import BenchFlags, Format, Metric
from minivllm_cli.bench.saved import SavedRow, SavedRun, read_run
from minivllm_cli.bench.stats import FEWEST, interval_of_change
from minivllm_cli.bench.workload import workload_title
from minivllm_cli.bench.writer import md_line, number
from minivllm_cli.command import Invocation
from minivllm_cli.console.streams import print_result, strip_controls
from minivllm_cli.console.table import Column, table_text
from minivllm_cli.errors import CliError, ExitCode, Problem
from minivllm_engine.core.escape import escape, listed
from minivllm_engine.core.units import count_text, parse_fraction
from minivllm_engine.protocol.strict_json import dump_line

_LEAST = 1e-18  # below it a quotient could be infinite


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
    metric, most = flags.metric or Metric.TOK_S, _share(flags.fail_if_slower)
    base, new = runs = [read_run(path) for path in flags.compare]
    for path, one in zip(flags.compare, runs, strict=True):
        if not one.complete:
            run.console.warn(f"{path} was interrupted: it has some of its rows")
    _check_rows(flags.compare, runs)
    _check_comparable(run, base, new, force=flags.force)
    changes, left_out = _changes(base, new, metric)
    if not changes:
        raise CliError(f"no row of both runs has {metric}", hint=f"--metric {Metric.TOK_S}")
    if left_out:
        has = "has" if len(left_out) == 1 else "have"
        titles = listed((row.title for row in left_out), most=3)
        total = count_text(len(left_out) + len(changes), "common row")
        run.console.warn(f"{len(left_out)} of {total} {has} no {metric} to compare: {titles}")
    document = _document(base, new, metric, changes, [str(path) for path in flags.compare])
    text = _comparison_text(document, markdown=output is Format.MD)
    if output is Format.JSON:
        print_result(dump_line(document).decode())
        for line in text.splitlines():
            run.console.note(line)
    else:
        print_result(text)
    return ExitCode.OK if most is None else _judge(run, changes, most)


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


def _check_rows(paths: Sequence[Path], runs: Sequence[SavedRun]) -> None:
    """Refuse runs that share no row, which no `--force` makes comparable."""
    base, new = ({row.key for row in run.rows} for run in runs)
    if base & new:
        return
    has = (
        f"{path} has {listed((row.title for row in run.rows), most=3)}"
        for path, run in zip(paths, runs, strict=True)
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


def _changes(base: SavedRun, new: SavedRun, metric: Metric) -> tuple[list[Change], list[SavedRow]]:
    """Rows of both runs: what changed, and those that have nothing to compare."""
    others = {row.key: row.values(metric) for row in new.rows}
    changes, left_out = [], []
    for row in base.rows:
        before, after = row.values(metric), others.get(row.key)
        if before and after and min(before) >= _LEAST:
            changes.append(_change(row, before, after, metric))
        elif after is not None:
            left_out.append(row)
    return changes, left_out


def _change(row: SavedRow, before: list[float], after: list[float], metric: Metric) -> Change:
    base, new = statistics.median(before), statistics.median(after)
    change = new / base - 1
    interval = interval_of_change(before, after)
    slower = base / new - 1 if metric is Metric.TOK_S else change
    if interval is None:
        verdict = "too few"
    elif interval[0] <= 0 <= interval[1]:
        verdict = "within noise"
    else:
        verdict = "slower" if slower > 0 else "faster"
    return Change(row, base, new, change, interval, slower, verdict)


def _document(
    base: SavedRun, new: SavedRun, metric: Metric, changes: list[Change], files: list[str]
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
                "interval": change.interval,
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


def _comparison_text(document: dict[str, Any], *, markdown: bool) -> str:
    """The settings that differ, then a line a row: of a table below the title of its workload."""
    text = ""
    for section in ("config", "env"):
        for key, *values in document["differs"][section]:
            base, new = ("unset" if v is None else escape(v, 60) for v in values)
            text += f"{'- ' if markdown else ''}{section} {escape(key, 60)}: {base} → {new}\n"
    text += "\n" if text else ""
    names = ["batch", "variant", f"{document['metric']} BASE", "NEW", "Δ %", "95 %", "verdict"]
    rows = [(workload_title(row["workload"]), _cells(row)) for row in document["rows"]]
    if markdown:
        text += md_line(["workload", *names]) + md_line(["---"] * (len(names) + 1))
        text += "".join(md_line([title, *cells]) for title, cells in rows)
    else:
        columns = [Column(name, right=name not in ("variant", "verdict")) for name in names]
        lines = table_text(columns, [cells for _, cells in rows]).splitlines()
        text += f"  {lines[0]}\n"
        last = None
        for (title, _), line in zip(rows, lines[1:], strict=True):
            text += f"{title}\n" if title != last else ""
            text += f"  {line}\n"
            last = title
    # Files come from anywhere, and this goes to a terminal.
    return strip_controls(text)


def _cells(row: dict[str, Any]) -> list[str]:
    interval = row["interval"]
    return [
        str(row["workload"]["batch"]),
        row["variant"],
        number(row["base"]),
        number(row["new"]),
        f"{row['change']:+.1%}",
        "too few" if interval is None else f"{interval[0]:+.1%} … {interval[1]:+.1%}",
        row["verdict"],
    ]


def _judge(run: Invocation, changes: list[Change], most: float) -> ExitCode:
    """Say whether a row is slower by more than `most`.

    Raises:
        CliError: of some rows it cannot be said.
    """
    few = sum(change.interval is None for change in changes)
    rows = count_text(len(changes), "row")
    if few:
        raise CliError(
            f"--fail-if-slower: too few samples to tell a change from noise in {few} of {rows}",
            why=f"{FEWEST} are needed in both runs, so each --save with --reps {FEWEST} or more",
        )
    slower = [c for c in changes if c.verdict == "slower" and c.slower > most]
    if not slower:
        return ExitCode.OK
    worst = max(slower, key=lambda c: c.slower)
    run.console.error(
        Problem(
            f"slower by more than {most:.1%}: {len(slower)} of {rows}",
            why=f"{worst.row.title}: {worst.slower:.1%} slower",
        )
    )
    return ExitCode.CHECK_FAILED
