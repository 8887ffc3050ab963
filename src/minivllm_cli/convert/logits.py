"""`--verify-logits FILE`: the last word on a conversion, spoken by the program that made the weights."""

from pathlib import Path
from typing import TYPE_CHECKING

from minivllm_cli.command import Invocation
from minivllm_cli.errors import CliError, ExitCode, Problem
from minivllm_engine.conversion import Plan, Report
from minivllm_engine.core.units import count_text

if TYPE_CHECKING:
    from minivllm_engine.conversion.stored_logits import LogitsReport


def check_logits_file(run: Invocation, file: Path, plan: Plan) -> None:
    """Before anything is converted: can its result be compared with `file`?

    Raises:
        CliError: there is no such file, or the target will be incomplete.
        ConfigError: `file` is not of the form needed, or belongs to another model.
    """
    if plan.missing:
        raise CliError(
            f"--verify-logits needs a whole model; this is without {count_text(len(plan.missing), 'tensor')}",
            why="--allow-missing makes an incomplete target, which cannot be run",
            hint="Leave one of them out.",
        )
    if not file.is_file():
        raise CliError(
            f"--verify-logits {file}: there is no such file",
            why="it is looked at before anything is converted",
            hint="safetensors with input_ids [T] and the logits [N, vocab_size] of the last N tokens",
        )
    run.interrupts.activity = "looking at stored logits"
    from minivllm_engine.conversion.stored_logits import check_stored_logits

    check_stored_logits(file, plan.config["text_config"]["vocab_size"])


def verify_logits(run: Invocation, dst: Path, file: Path, report: Report) -> "LogitsReport":
    """Run what was converted in fp32 and compare its logits with those in `file`.

    Raises:
        ConfigError: `file` is not of the form needed, or belongs to another model.
    """
    run.interrupts.activity = "comparing logits"
    run.console.note(f"comparing logits with {file}")
    from minivllm_engine.conversion.stored_logits import compare_logits

    return compare_logits(dst, file, cast=bool(report.casts))


def report_logits(run: Invocation, dst: Path, file: Path, found: "LogitsReport") -> ExitCode:
    """Say on stderr what the comparison gave; the exit code."""
    figures = (
        f"largest difference {found.max_difference:.2g}, {found.tolerance:.2g} allowed; the best token "
        f"differs at {found.num_other_tokens:,} of {found.num_positions:,} positions"
    )
    if found.ok:
        run.console.note(f"logits agree: {figures}")
        return ExitCode.OK
    problem = Problem(
        f"the logits of {dst} are not those in {file}",
        why=f"{figures}. Rows may lie otherwise than names and shapes tell",
        hint="--overwrite with another --q-gate-layout or --qkvz-layout, if the source had a choice",
    )
    run.console.error(problem)
    return ExitCode.CHECK_FAILED
