"""A conversion: the place it goes to, the run itself, its progress, what came out, and stored logits."""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm_cli.command import Invocation
from minivllm_cli.config.settings import Settings
from minivllm_cli.console.progress import Progress, RateMeter, Reporter, make_reporter
from minivllm_cli.console.streams import claim_stdout, strip_controls
from minivllm_cli.console.table import output_width
from minivllm_cli.convert.flags import ConvertFlags, Verify
from minivllm_cli.convert.table import totals, wrapped
from minivllm_cli.errors import CliError, ExitCode, Problem
from minivllm_engine.conversion import Cast, Plan, Report, Source
from minivllm_engine.conversion.destination import Destination, is_filled
from minivllm_engine.conversion.plan import partial_path
from minivllm_engine.conversion.report import Progress as EngineProgress
from minivllm_engine.conversion.report import destination_errors
from minivllm_engine.core.units import count_text, format_size


def check_destination(dst: Path, source: Source, flags: ConvertFlags) -> Destination:
    """Check and return the paths of a conversion to `dst`.

    Raises:
        CliError: it is a directory that cannot be renamed over.
        ConversionError: something is there, or it is where the source is.
    """
    real = Path(os.path.realpath(dst))
    if real == Path.cwd() or not real.name:
        what = "the current directory" if real.name else "the root directory"
        raise CliError(
            f"DST {dst} is {what}",
            why="a target is built beside DST and renamed to it when it is complete",
            hint="the path of a new directory",
        )
    destination = Destination.of(dst)
    destination.check(source, resume=flags.resume, overwrite=flags.overwrite)
    return destination


@destination_errors()
def confirm_overwrite(run: Invocation, dst: Path, destination: Destination, *, yes: bool) -> None:
    """Ask before DST, or what an earlier run left beside it, is replaced.

    Nobody is asked where there is nothing, or where the answer was given.

    Raises:
        CliError: the answer is no, or nobody can be asked.
    """
    # As it was typed: what is long would be parted by the terminal.
    places = {dst: destination.path, partial_path(dst): destination.partial}
    full = {name: place for name, place in places.items() if is_filled(place)}
    if yes or not full:
        return
    what = " and ".join(f"{name} ({_content(place)})" for name, place in full.items())
    if not sys.stdin or not sys.stdin.isatty():
        raise CliError(
            f"--overwrite would replace {what}",
            why="stdin is no terminal, so nobody can be asked",
            hint="--overwrite -y",
        )
    run.interrupts.activity = "asking"
    lines = wrapped(f"replace {strip_controls(what)}? [y/N]", output_width(run.console.live))
    run.console.write("\n".join(lines) + " ")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CliError(
            "nothing was replaced",
            why="the question was not answered with y or yes",
            hint="another DST, or --overwrite -y",
        )


def _content(place: Path) -> str:
    files = [file for file in place.iterdir() if file.is_file()]
    size = format_size(sum(file.lstat().st_size for file in files))
    return f"{count_text(len(files), 'file')}, {size}"


if TYPE_CHECKING:
    from minivllm_engine.conversion.stored_logits import LogitsReport


_MIN_SECONDS = 0.5


class ConversionProgress:
    """Called by the engine after every tensor. Raises KeyboardInterrupt once a signal came."""

    def __init__(self, run: Invocation, reporter: Reporter) -> None:
        self._run = run
        self._reporter = reporter
        self._phase = ""
        self._meter = RateMeter()

    def __call__(self, now: EngineProgress) -> None:
        self._run.interrupts.check()
        if now.phase != self._phase:
            self._phase, self._meter = now.phase, RateMeter()
        self._meter.add(now.done_bytes, 0)
        rate = self._meter.rates()[0]
        left = now.total_bytes - now.done_bytes
        # A rate over less than that says little about what is to come.
        known = rate > 0 and self._meter.seconds >= _MIN_SECONDS
        self._reporter.update(
            Progress(
                now.phase,
                now.done_bytes,
                now.total_bytes,
                detail=f"shard {now.shard}/{now.num_shards}",
                bytes_s=rate,
                eta_s=left / rate if known else None,
            )
        )


@contextmanager
def conversion_progress(run: Invocation, settings: Settings) -> Iterator[ConversionProgress]:
    """Show progress in the style that was chosen, from the loading of torch on.

    The terminal is as it was afterwards.
    """
    reporter = make_reporter(settings.output.progress, run.console)
    try:
        reporter.update(Progress("loading", detail="torch"))
        yield ConversionProgress(run, reporter)
    finally:
        reporter.close()


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


def check_logits_file(run: Invocation, file: Path, plan: Plan) -> None:
    """Check before anything is converted that its result can be compared with `file`.

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
