"""What a conversion would do: `--dry-run` and `--explain`, and the plan that a conversion starts from."""

import json
from pathlib import Path
from typing import Any

from minivllm_cli.command import Invocation
from minivllm_cli.console.streams import claim_stdout, strip_controls
from minivllm_cli.console.table import output_width
from minivllm_cli.convert.converting import check_destination
from minivllm_cli.convert.flags import ConvertFlags
from minivllm_cli.convert.mapping_file import read_mapping
from minivllm_cli.convert.table import (
    plan_text,
    problem_lines,
    totals,
    wrapped,
)
from minivllm_cli.errors import CliError, ExitCode, Problem
from minivllm_engine.conversion import ConvertOptions, Plan, explain, open_source, plan_conversion
from minivllm_engine.conversion.explaining import Proposal, proposal, reason
from minivllm_engine.conversion.problems import counted
from minivllm_engine.conversion.source import Source
from minivllm_engine.core.escape import escape
from minivllm_engine.core.units import format_size, parse_size

# Characters of a step of `--explain`.
_MOST = 1000
# Problems that a conversion shows before it gives up.
_MOST_PROBLEMS = 50


def read_source(run: Invocation, flags: ConvertFlags, src: Path) -> Source:
    """Read the headers of SRC, and write to stderr what should be known about them.

    Raises:
        CheckpointError: it cannot be converted.
    """
    run.interrupts.activity = "looking at the source"
    return open_source(
        src, model_config=flags.model_config, state_key=flags.state_key, ema=flags.ema
    )


def make_plan(run: Invocation, flags: ConvertFlags, src: Path, dst: Path | None) -> Plan:
    """Make the plan for SRC; its notes are written to stderr.

    Raises:
        CliError: an option whose value is none, or a mapping file that is none.
        CheckpointError: SRC cannot be converted.
    """
    options = _options(flags)
    claim_stdout()  # torch may be loaded for .pt and .bin files
    plan = plan_conversion(read_source(run, flags, src), options, dst=dst)
    for note in plan.notes:
        run.console.note(f"note: {note}")
    return plan


def show_plan(run: Invocation, flags: ConvertFlags, plan: Plan, dst: Path | None) -> int:
    """Show what `--dry-run` asks for: mapping table, totals, verdict; exit code 5 where not all is covered.

    Raises:
        CliError: there is not enough disk, or DST is no fit place.
        ConversionError: something is at DST, or it is where the source is.
    """
    results = claim_stdout()
    out = proposal(plan) if plan.problems else None
    if flags.json_:
        if not run.console.json_events:
            width = output_width(run.console.live)
            run.console.note(plan_text(plan, dst, width).rstrip("\n"))
        document = plan.to_json()
        document["remedy"] = out and {
            "text": out.text,
            "mapping": None if out.mapping is None else dict(out.mapping),
        }
        results.write_text(json.dumps(document, allow_nan=False) + "\n")
    else:
        text = plan_text(plan, dst, output_width(results.is_terminal))
        results.write_text(strip_controls(text))
    if out is not None:
        run.console.error(_not_covered(plan, out))
        return ExitCode.CHECK_FAILED
    if dst is not None:
        check_destination(dst, plan.source, flags)
    needs = plan.needs
    if needs.disk_free is not None and needs.disk > needs.disk_free:
        raise CliError(
            f"{dst} needs {format_size(needs.disk)} of disk",
            why=f"{format_size(needs.disk_free)} are free there",
            hint="Free some space, or give a directory on another disk.",
        )
    return ExitCode.OK


def report_problems(run: Invocation, plan: Plan) -> int:
    """Report what forbids a conversion, on stderr; exit code 5."""
    lines = problem_lines(plan.problems[:_MOST_PROBLEMS], output_width(run.console.live))
    more = len(plan.problems) - _MOST_PROBLEMS
    if more > 0:
        lines.append(f"... and {more:,} more: --dry-run shows all")
    for line in (*lines, *totals(plan)):
        run.console.note(line)
    run.console.error(_not_covered(plan, proposal(plan)))
    return ExitCode.CHECK_FAILED


def _not_covered(plan: Plan, out: Proposal) -> Problem:
    what = f"{', '.join(counted(plan.problems))}; nothing written"
    return Problem(what, why=reason(plan), hint=out.text)


def explain_tensor(plan: Plan, name: str, *, as_json: bool) -> int:
    """Write the rules that one tensor goes through, on stdout, for `--explain NAME`."""
    found = explain(plan, name)
    results = claim_stdout()
    if as_json:
        document: dict[str, Any] = {
            "schema_version": 1,
            "kind": "convert-explain",
            "explanations": [
                {
                    "name": one.name,
                    "side": one.side,
                    "steps": [{"rule": step.rule, "text": step.text} for step in one.steps],
                }
                for one in found
            ],
        }
        results.write_text(json.dumps(document) + "\n")
        return ExitCode.OK
    width = output_width(results.is_terminal)
    for one in found:
        lines = [f"{escape(one.name)} ({one.side})"]
        room = max(len(step.rule) for step in one.steps) + 4
        for step in one.steps:
            first, *rest = wrapped(escape(step.text, _MOST), width and width - room)
            lines.append(f"  {step.rule}".ljust(room) + first)
            lines += [" " * room + line for line in rest]
        results.write_text(strip_controls("".join(line + "\n" for line in lines)))
    return ExitCode.OK


def _options(flags: ConvertFlags) -> ConvertOptions:
    chosen: dict[str, Any] = {
        "dtype": flags.dtype,
        "qkvz_layout": flags.qkvz_layout,
        "q_gate_layout": flags.q_gate_layout,
    }
    options: dict[str, Any] = {key: word.value for key, word in chosen.items() if word is not None}
    if flags.max_shard_size is not None:
        options["max_shard_bytes"] = _shard_size(flags.max_shard_size)
    if flags.mapping is not None:
        options["renames"] = read_mapping(flags.mapping)
    return ConvertOptions(
        **options,
        allow_unmatched=tuple(flags.allow_unmatched or ()),
        allow_missing=tuple(flags.allow_missing or ()),
    )


def _shard_size(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise CliError(
            f"--max-shard-size {text} is no size", why=str(error), hint="--max-shard-size 5GB"
        ) from None
    if size < 1:
        raise CliError(
            f"--max-shard-size {text}: a file needs a byte at least",
            why="whole tensors are put into files, and one that is larger has a file of its own",
            hint="--max-shard-size 5GB",
        )
    return size
