"""`--check`: a finished conversion is read again and compared with its source."""

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm_cli.command import Invocation
from minivllm_cli.config.settings import Settings
from minivllm_cli.console.streams import claim_stdout, strip_controls
from minivllm_cli.convert.converting import conversion_progress
from minivllm_cli.convert.flags import ConvertFlags
from minivllm_cli.convert.planning import read_source
from minivllm_cli.errors import ExitCode, Problem
from minivllm_engine.core.escape import escape
from minivllm_engine.core.units import count_text, format_size

if TYPE_CHECKING:
    from minivllm_engine.conversion import CheckReport

_MOST_SHOWN, _MOST_CHARACTERS = 50, 1000


def check_target(
    run: Invocation, settings: Settings, flags: ConvertFlags, src: Path, dst: Path
) -> int:
    """Compare DST with SRC and print what differs; exit code 5 if anything does.

    Raises:
        CheckpointError: DST has no manifest, or SRC cannot be read.
    """
    results = claim_stdout()
    source = read_source(run, flags, src)
    run.interrupts.activity = "checking"
    with conversion_progress(run, settings) as progress:
        from minivllm_engine.conversion import check

        report = check(source, dst, progress=progress)
    if flags.json_:
        results.write_text(json.dumps(report.to_json(), allow_nan=False) + "\n")
    else:
        results.write_text(strip_controls(_text(report)))
    if report.ok:
        return ExitCode.OK
    number = len(report.differences)
    run.console.error(
        Problem(
            f"{dst} is incomplete: --allow-missing has left out {count_text(number, 'tensor')}"
            if all(found.kind == "incomplete" for found in report.differences)
            else f"{dst} has {count_text(number, 'difference')} from what {src} gives",
            why=_why(report),
            hint=_remedy(report, src, dst),
        )
    )
    return ExitCode.CHECK_FAILED


def _why(report: "CheckReport") -> str:
    """How many there are of each kind, which the list may not show in full."""
    counts = Counter(found.kind.replace("_", " ") for found in report.differences)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common())
    return f"{kinds}, of {count_text(report.num_tensors, 'tensor')} in {_files(report)}"


def _remedy(report: "CheckReport", src: Path, dst: Path) -> str:
    again = f"minivllm convert-weights {{}} {shlex.quote(str(dst))} --overwrite"
    if all(found.kind == "incomplete" for found in report.differences):
        return f"convert a source that holds them: {again.format('SRC')}"
    if all(found.kind == "refused" for found in report.differences):
        return (
            f"mend what the loader refuses, or convert again: {again.format(shlex.quote(str(src)))}"
        )
    return again.format(shlex.quote(str(src)))


def _files(report: "CheckReport") -> str:
    return count_text(report.num_shards, "file")


def _text(report: "CheckReport") -> str:
    lines = [
        f"{found.kind.upper().replace('_', ' ')}  {escape(found.name)}  "
        f"{escape(found.detail, _MOST_CHARACTERS)}".rstrip()
        for found in report.differences[:_MOST_SHOWN]
    ]
    more = len(report.differences) - _MOST_SHOWN
    if more > 0:
        lines.append(f"... and {more:,} more (--json has all)")
    verdict = "no difference" if report.ok else f"{len(report.differences):,} differ"
    lines.append(
        f"{count_text(report.num_tensors, 'tensor')}, {_files(report)}, "
        f"{format_size(report.num_bytes)}: {verdict}"
    )
    return "".join(line + "\n" for line in lines)


if TYPE_CHECKING:
    pass
