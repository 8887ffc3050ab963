"""`--verify-logits FILE`: the last word on a conversion, spoken by the program that made the weights."""

from pathlib import Path
from typing import TYPE_CHECKING

from minivllm_cli.command import Invocation
from minivllm_cli.problems import CliError, ExitCode, Problem
from minivllm_engine.conversion import Report

if TYPE_CHECKING:
    from minivllm_engine.stored_logits import LogitsReport


def check_logits_file(file: Path) -> None:
    """Before anything is converted: is there such a file?

    Raises:
        CliError: no.
    """
    if not file.is_file():
        raise CliError(
            f"--verify-logits {file}: there is no such file",
            hint="safetensors with input_ids [T] and the logits [N, vocab_size] of the last N tokens",
        )


def verify_logits(run: Invocation, dst: Path, file: Path, report: Report) -> "LogitsReport":
    """Run what was converted in fp32 and compare its logits with those in `file`.

    Raises:
        ConfigError: `file` is not of the form needed, or belongs to another model.
    """
    run.interrupts.activity = "comparing logits"
    run.console.note(f"comparing logits with {file}")
    from minivllm_engine.stored_logits import compare_logits

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
