"""A conversion: what it will take, the run itself, and what came out."""

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minivllm_cli.command import Invocation
from minivllm_cli.config.settings import Settings
from minivllm_cli.console.streams import claim_stdout
from minivllm_cli.convert.flags import ConvertFlags, Verify
from minivllm_cli.convert.logits import report_logits, verify_logits
from minivllm_cli.convert.progress import conversion_progress
from minivllm_cli.convert.table import totals
from minivllm_cli.errors import ExitCode
from minivllm_engine.conversion import Cast, Plan, Report
from minivllm_engine.core.units import count_text


def convert_source(
    run: Invocation,
    settings: Settings,
    flags: ConvertFlags,
    plan: Plan,
    dst: Path,
    partial: Path,
) -> int:
    """Carry out a plan without problems; print the path of DST (or with `--json` a report) on stdout.

    Args:
        partial: where it is built, and left if it is interrupted.

    Raises:
        ConversionError: it cannot be done, or what was written is not right.
    """
    for line in totals(plan):
        run.console.note(line)
    results = claim_stdout()
    run.interrupts.activity = "converting"
    try:
        with conversion_progress(run, settings) as progress:
            from minivllm_engine.conversion import convert

            report = convert(
                plan,
                dst,
                resume=flags.resume,
                overwrite=flags.overwrite,
                verify=(flags.verify or Verify.SAMPLE).value,
                argv=tuple(sys.argv[1:]),
                progress=progress,
            )
    except KeyboardInterrupt:
        if partial.exists():
            run.console.note(f"{partial} is kept: --resume goes on with it")
        raise
    for note in report.notes:
        run.console.note(f"note: {note}")
    for line in _cast_lines(report.casts):
        run.console.note(line)
    run.console.note(_summary(report))
    code, logits = ExitCode.OK, None
    if flags.verify_logits is not None:
        logits = verify_logits(run, dst, flags.verify_logits, report)
        code = report_logits(run, dst, flags.verify_logits, logits)
    if flags.json_:
        document = _document(report, dst) | {
            "logits": logits and {**asdict(logits), "ok": logits.ok}
        }
        results.write_text(json.dumps(document, allow_nan=False) + "\n")
    elif code == ExitCode.OK:
        if results.is_terminal:
            results.write_text(f"{dst}\n")
        else:
            # A path need not be UTF-8, and whoever reads this opens it.
            results.write(os.fsencode(dst) + b"\n")
    return code


def _cast_lines(casts: Iterable[Cast]) -> list[str]:
    """The worst cast of each pair of types."""
    worst: dict[tuple[str, str], Cast] = {}
    for cast in casts:
        before = worst.get((cast.before, cast.after))
        if before is None or cast.max_relative_error > before.max_relative_error:
            worst[cast.before, cast.after] = cast
    return [
        f"{before} → {after} is rounded: relative error at most {cast.max_relative_error:.1e}, "
        f"in {cast.worst}"
        for (before, after), cast in worst.items()
    ]


def _summary(report: Report) -> str:
    resumed = sum(shard.resumed for shard in report.shards)
    files = count_text(len(report.shards), "file")
    text = f"{count_text(report.num_tensors, 'tensor')} in {files}"
    if resumed:
        text += f" ({resumed} from an earlier run)"
    if report.verified != "none":
        text += f", {report.num_verified:,} read back and compared"
    return f"{text}, {report.seconds:.1f} s"


def _document(report: Report, dst: Path) -> dict[str, Any]:
    fields = asdict(report)
    return {"schema_version": 1, "kind": "convert-report", **fields, "dst": str(dst)}
