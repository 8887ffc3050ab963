"""`--check`: a finished conversion is read again and compared with its source."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm_cli.command import Invocation
from minivllm_cli.console import claim_stdout, strip_controls
from minivllm_cli.convert.flags import ConvertFlags
from minivllm_cli.convert.planning import read_source
from minivllm_cli.convert.progress import conversion_progress
from minivllm_cli.problems import ExitCode, Problem
from minivllm_cli.settings import Settings
from minivllm_engine.units import format_size

if TYPE_CHECKING:
    from minivllm_engine.conversion import CheckReport

_MOST_SHOWN = 50


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
            f"{dst} has {number:,} difference{'' if number == 1 else 's'} from what {src} gives",
            hint=f"minivllm convert-weights {src} {dst} --overwrite",
        )
    )
    return ExitCode.CHECK_FAILED


def _text(report: "CheckReport") -> str:
    lines = [
        f"{found.kind.upper().replace('_', ' ')}  {found.name}  {found.detail}".rstrip()
        for found in report.differences[:_MOST_SHOWN]
    ]
    more = len(report.differences) - _MOST_SHOWN
    if more > 0:
        lines.append(f"... and {more:,} more (--json has all)")
    verdict = "no difference" if report.ok else f"{len(report.differences):,} differ"
    lines.append(
        f"{report.num_tensors:,} tensors, {report.num_shards} files, "
        f"{format_size(report.num_bytes)}: {verdict}"
    )
    return "".join(line + "\n" for line in lines)
