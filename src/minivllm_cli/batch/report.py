"""What a batch says on stderr and in `--summary`: bad lines, figures, how it ended, what helps."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minivllm_cli.batch.flags import GenerateFlags
from minivllm_cli.batch.jobs import Scan
from minivllm_cli.batch.tally import Tally
from minivllm_cli.batch.verify import verify_text
from minivllm_cli.console.streams import Console
from minivllm_cli.errors import ExitCode, OutputFailed, Problem
from minivllm_cli.files.atomic_file import write_atomic
from minivllm_cli.files.input_file import InputFile
from minivllm_cli.files.output_target import OutputTarget
from minivllm_engine.core.errors import RequestError
from minivllm_engine.core.units import count_text
from minivllm_engine.protocol.lines import BadLine, Line

_MOST_BAD_LINES = 20
_MANY_CUT = 0.05
# Percentiles of fewer requests say nothing.
_MANY_REQUESTS = 20
# Errors of lines whose record has another id than the line will have when it is corrected.
_LOSES_ITS_ID = frozenset({"invalid_json_line", "duplicate_custom_id"})
_KINDS = {
    "messages": "chat",
    "prompt": "prompt",
    "text": "text line",
    "tokens": "token-id prompt",
    "batch": "batch line",
    "bad": "bad line",
}


class LineReports:
    """Names lines that cannot be answered as `file:line:col`; beyond the twentieth only their number.

    Args:
        all_of_them: each is an error, because nothing will be run.
    """

    def __init__(self, console: Console, name: str, *, all_of_them: bool = False) -> None:
        self._console, self._name, self._all_of_them = console, name, all_of_them
        self._count = 0

    def bad(self, line: BadLine) -> None:
        """Name a line that is no request."""
        self._say(f"{self._place(line)}:{line.column}", line.message, line.code, line.hint)

    def refused(self, line: Line, error: RequestError, hint: str | None) -> None:
        """Name a request that the chat template or the engine refused."""
        message = f"{error.what}: {error.why}" if error.why else error.what
        self._say(self._place(line), message, error.code, hint)

    def end(self) -> None:
        """Say how many were not named."""
        if not self._all_of_them and self._count > _MOST_BAD_LINES:
            more = self._count - _MOST_BAD_LINES
            self._console.warn(f"{more} more bad lines; each of them has an error record")
        self._count = 0

    def _place(self, line: Line) -> str:
        return self._name if line.number is None else f"{self._name}:{line.number}"

    def _say(self, place: str, message: str, code: str, hint: str | None) -> None:
        self._count += 1
        text = f"{place}: {message} ({code})" + (f"; {hint}" if hint else "")
        if self._all_of_them:
            self._console.error(Problem(text))
        elif self._count <= _MOST_BAD_LINES:
            self._console.warn(text)


def report_interrupt(
    console: Console, tally: Tally, scan: Scan, flags: GenerateFlags, target: OutputTarget
) -> None:
    """Say how much is safe, and what continues it."""
    done = scan.counted(tally.num_records)
    if not target.is_file:
        console.write_line(f"{done} written; a new run starts again")
        return
    without = " without --overwrite" if flags.overwrite else ""
    console.write_line(f"{done} saved. Re-run the same command{without} to continue.")


def report_end(
    console: Console,
    tally: Tally,
    scan: Scan,
    flags: GenerateFlags,
    source: InputFile | None,
    advice: str | None,
) -> ExitCode:
    """Write the summary, advice and failures of a run that came to its end. Returns its exit code."""
    if source is not None:
        _report_figures(console, tally, scan, flags, source)
        if advice:
            console.note(f"advice: {advice}")
        if source.changed:
            console.warn(f"{source.name} was written to during the run; what was added is left out")
    cut, ended = tally.ended["length"], tally.ended.total()
    if cut > _MANY_CUT * ended:
        own = scan.num_own_max_tokens
        lines = count_text(scan.total - scan.num_bad, "line")
        console.warn(
            f"{cut} of {count_text(ended, 'output')} stopped at max_tokens; "
            + (
                f"{own} of {lines} set it themselves, or --force-param does"
                if own
                else "--max-tokens N gives them more room"
            )
        )
    code = _report_verify(console, tally)
    if not tally.num_failed:
        return code
    causes = ", ".join(f"{code} {n}" for code, n in tally.failed.most_common())
    console.error(
        Problem(
            f"{tally.num_failed} of {count_text(scan.total, 'request')} failed: {causes}",
            hint=_way_out(tally, scan, flags, source),
        )
    )
    return code or ExitCode.SOME_REQUESTS_FAILED


def _way_out(
    tally: Tally, scan: Scan, flags: GenerateFlags, source: InputFile | None
) -> str | None:
    """What answers the failed requests after all; None where the same would happen again."""
    if flags.output in (None, "-") or source is None or source.path is None:
        return None
    again = f"--only-failed {flags.output} --output {_unused_name()}"
    if set(tally.failed) == {"prompt_too_long"}:
        return f"--truncate middle {again}"
    if tally.num_failed == scan.num_bad:
        lost = not _LOSES_ITS_ID.isdisjoint(scan.bad_codes)
        return f"correct these lines of {source.name}, then {'--overwrite' if lost else again}"
    return None


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


def _report_figures(
    console: Console, tally: Tally, scan: Scan, flags: GenerateFlags, source: InputFile
) -> None:
    if console.json_events and not console.quiet:
        console.event("summary", **tally.summary())
        return
    blank = 0 if flags.limit is not None else source.num_blank
    output = None if flags.output in (None, "-") else flags.output
    for line in render_summary(tally, scan.kinds, blank, output, all_of_it=console.verbosity > 0):
        console.note(line)


def render_summary(
    tally: Tally,
    kinds: Mapping[str, int],
    num_blank: int,
    output: str | None,
    *,
    all_of_it: bool = False,
) -> list[str]:
    """Make lines of two columns; of few requests three or four, unless `all_of_it` is asked for.

    Args:
        kinds: the input's lines of each kind.
        output: the file that was written, if one was.
    """
    document = tally.summary()
    tokens, seconds, rates = document["tokens"], document["seconds"], document["tok_s"]
    many = all_of_it or tally.num_run >= _MANY_REQUESTS
    rows = [
        ("input", _input_text(kinds, num_blank) if many or num_blank else ""),
        ("requests", _requests_text(tally)),
        ("tokens", _tokens_text(tokens)),
        ("cache", _cache_text(tally) if many else ""),
    ]
    if many:
        other = max(seconds["wall"] - seconds["load"] - seconds["generate"], 0)
        rows += [
            (
                "time",
                f"{seconds['wall']:.1f} s = load {seconds['load']:.1f} + "
                f"generate {seconds['generate']:.1f} + other {other:.1f}",
            ),
            ("speed", f"out {rates['out']:,.1f} tok/s · in {rates['in']:,.1f} tok/s"),
            ("TTFT", _percentile_text(document["ttft_s"])),
            ("E2E", _percentile_text(document["e2e_s"])),
            ("peak", _peak_text(tally)),
        ]
    else:
        rows.append(("time", f"{seconds['wall']:.1f} s · out {rates['out']:,.1f} tok/s"))
    if tally.verify is not None:
        rows.append(("verify", verify_text(tally.verify)))
    rows.append(("output", output or ""))
    if many:
        limits = document["limited_by"]
        text = " · ".join(f"{name} {share:.0%} of steps" for name, share in limits.items())
        rows.append(("limited by", text))
    rows = [row for row in rows if row[1]]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows]


def kinds_text(kinds: Mapping[str, int]) -> list[str]:
    """Say how many lines there are of each kind that there is: "8 chats", "1 prompt"."""
    return [count_text(n, _KINDS[kind]) for kind, n in kinds.items() if n]


def _input_text(kinds: Mapping[str, int], num_blank: int) -> str:
    return " · ".join(kinds_text(kinds) + ([f"{num_blank:,} blank skipped"] if num_blank else []))


def _requests_text(tally: Tally) -> str:
    parts = [f"{tally.num_ok:,} ok", f"{tally.num_failed:,} failed"]
    parts += [f"{n:,} ended at {r}" for r, n in tally.ended.items() if r in ("length", "context")]
    if tally.num_truncated:
        parts.append(f"{tally.num_truncated:,} truncated")
    if tally.num_resumed:
        parts.append(f"{tally.num_resumed:,} from an earlier run")
    return " · ".join(parts)


def _tokens_text(tokens: dict[str, int]) -> str:
    new = tokens["in"] - tokens["cached"]
    text = (
        f"in {tokens['in']:,} = {tokens['cached']:,} reused + {new:,} new · out {tokens['out']:,}"
    )
    return text + (f" · reasoning {tokens['reasoning']:,}" if tokens["reasoning"] else "")


def _cache_text(tally: Tally) -> str:
    parts = [f"hit {tally.hit:.0%}"]
    if tally.misses:
        parts.append("misses: " + ", ".join(f"{r} {n:,}" for r, n in tally.misses.most_common()))
    if tally.stats is not None and tally.stats.restored_tokens:
        # No reuse of another request's work, so it is in no other figure.
        restored = tally.stats.restored_tokens
        parts.append(f"restored {restored:,} tokens after preemptions and for further outputs")
    return " · ".join(parts)


def _peak_text(tally: Tally) -> str:
    stats = tally.stats
    if stats is None:
        return ""
    return (
        f"KV {stats.kv_blocks_peak:,}/{stats.kv_blocks_total:,} blocks · "
        f"state {stats.state_slots_peak}/{stats.state_slots_total} slots · "
        f"snap {stats.snapshots_peak}/{stats.snapshots_total} · "
        f"preempted {stats.num_preemptions}"
    )


def _percentile_text(values: dict[str, Any]) -> str:
    return " · ".join(f"{name} {value:.3f} s" for name, value in values.items())
