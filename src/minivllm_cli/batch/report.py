"""What a batch says on stderr: bad lines, how it ended, what can be done about it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from minivllm_cli.batch.flags import GenerateFlags
from minivllm_cli.batch.overrides import forced_keys
from minivllm_cli.batch.scan import Scan
from minivllm_cli.batch.summary import cut_short, failure_text, render_summary
from minivllm_cli.batch.tally import Tally
from minivllm_cli.batch.verify import verify_text
from minivllm_cli.console.streams import Console
from minivllm_cli.errors import ExitCode, OutputFailed, Problem
from minivllm_cli.files.input_file import InputFile
from minivllm_cli.files.output_target import OutputTarget
from minivllm_engine.core.atomic_file import write_atomic
from minivllm_engine.protocol.lines import BadLine

_MOST_BAD_LINES = 20
# Errors of lines whose record has another id than the line will have when it is corrected.
_LOSES_ITS_ID = frozenset({"invalid_json_line", "duplicate_custom_id"})


@contextmanager
def report_bad_lines(
    console: Console, name: str, *, all_of_them: bool
) -> Iterator[Callable[[BadLine], None]]:
    """A function that reports bad lines as `file:line:col`; beyond the twentieth only their number."""
    count = 0

    def on_bad(line: BadLine) -> None:
        nonlocal count
        count += 1
        text = f"{name}:{line.number}:{line.column}: {line.message} ({line.code})"
        hint = f"; {line.hint}" if line.hint else ""
        if all_of_them:
            console.error(Problem(text + hint))
        elif count <= _MOST_BAD_LINES:
            console.warn(text + hint)

    yield on_bad
    if not all_of_them and count > _MOST_BAD_LINES:
        console.warn(f"{count - _MOST_BAD_LINES} more bad lines; each of them has an error record")


def report_interrupt(
    console: Console, tally: Tally, scan: Scan, flags: GenerateFlags, target: OutputTarget
) -> None:
    """How much is safe, and what continues it."""
    done = scan.counted(tally.num_records)
    if not target.is_file:
        console.write_line(f"{done} written; a new run starts again")
    elif flags.overwrite:
        console.write_line(
            f"{done} saved. Re-run the same command without --overwrite to continue."
        )
    else:
        console.write_line(f"{done} saved. Re-run the same command to continue.")


def report_end(
    console: Console,
    tally: Tally,
    scan: Scan,
    flags: GenerateFlags,
    source: InputFile | None,
    advice: str | None,
) -> ExitCode:
    """The summary, advice and failures of a run that came to its end; its exit code."""
    if source is not None:
        blank = 0 if flags.limit is not None else source.count_blank_lines()
        output = None if flags.output in (None, "-") else flags.output
        if console.json_events and not console.quiet:
            console.event("summary", **tally.summary())
        else:
            for line in render_summary(tally, scan.kinds, blank, output):
                console.note(line)
        if advice:
            console.note(f"advice: {advice}")
        if source.changed:
            console.warn(f"{source.name} was written to during the run; later lines are left out")
    text = cut_short(
        tally,
        scan.num_own_max_tokens,
        scan.total - scan.num_bad,
        forced="max_tokens" in forced_keys(flags.force_param or []),
    )
    if text:
        console.warn(text)
    code = _report_verify(console, tally)
    if not tally.num_failed:
        return code
    hint = None
    if flags.output not in (None, "-") and source is not None and source.path is not None:
        hint = f"--only-failed {flags.output} --output {_unused_name()}"
        if tally.num_failed == scan.num_bad:  # which fail again unless something is done
            lost = not _LOSES_ITS_ID.isdisjoint(scan.bad_codes)
            hint = f"correct these lines of {source.name}, then {'--overwrite' if lost else hint}"
    console.error(Problem(failure_text(tally, scan.total), hint=hint))
    return code or ExitCode.SOME_REQUESTS_FAILED


def _unused_name() -> str:
    names = ("retry.jsonl", *(f"retry-{number}.jsonl" for number in range(2, 100)))
    return next((name for name in names if not Path(name).exists()), "FILE")


def _report_verify(console: Console, tally: Tally) -> ExitCode:
    counts = tally.verify
    if counts is None:
        return ExitCode.OK
    if not counts.replayed:
        console.warn(f"--verify: {verify_text(counts)}")
    if not counts.different:
        return ExitCode.OK
    console.error(
        Problem(
            f"--verify: {counts.different} of {counts.replayed} replays differ from what was answered "
            "with the prefix cache",
            why=f"largest logit gap {counts.largest_gap:.2g}",
            hint="--set cache.prefix_cache=false",
        )
    )
    return ExitCode.CHECK_FAILED


def leave_summary(path: Path | None, tally: Tally, console: Console) -> None:
    """Write `--summary` of a run that a signal ended early: as far as it came, and saying so."""
    tally.complete = False
    try:
        write_summary(path, tally)
    except OutputFailed as error:
        console.warn(error.problems[0].what)


def write_summary(path: Path | None, tally: Tally) -> None:
    """Write `--summary`, whole or not at all.

    Raises:
        OutputFailed: it cannot be written.
    """
    if path is None:
        return
    try:
        write_atomic(path, (json.dumps(tally.summary()) + "\n").encode())
    except OSError as error:
        raise OutputFailed(
            f"cannot write {path}: {error.strerror or error}",
            why="the answers are not concerned",
            hint="make room there, or name another --summary",
        ) from None
