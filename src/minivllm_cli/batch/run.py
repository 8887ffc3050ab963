"""A run over many prompts: checks first, then one pass to look, one to answer, and the publication."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm_cli import engine
from minivllm_cli.batch.dry_run import run_dry
from minivllm_cli.batch.flags import GenerateFlags, InputFormat, OnError, Resume
from minivllm_cli.batch.jobs import JobSource, Scan, Selection
from minivllm_cli.batch.prompts import Overrides, PromptBuilder, check_thinking
from minivllm_cli.batch.remedies import Remedies
from minivllm_cli.batch.report import (
    LineReports,
    leave_summary,
    report_end,
    report_interrupt,
    write_summary,
)
from minivllm_cli.batch.run_loop import RunLoop
from minivllm_cli.batch.sinks import Sink, open_sink
from minivllm_cli.batch.tally import Tally
from minivllm_cli.batch.verify import Verifier, VerifyCounts
from minivllm_cli.cache_dump.watch import CacheWatch, cache_watch
from minivllm_cli.command import Invocation
from minivllm_cli.config.settings import Settings
from minivllm_cli.console.progress import Progress, Reporter, loading_progress, make_reporter
from minivllm_cli.console.streams import Console, guard_stdout
from minivllm_cli.errors import CliError, ExitCode
from minivllm_cli.files.fingerprint import fingerprint_parts
from minivllm_cli.files.input_file import InputFile
from minivllm_cli.files.journal import Journal
from minivllm_cli.files.output_target import OutputTarget, check_output, check_side_file
from minivllm_engine.core.units import count_text
from minivllm_engine.protocol.lines import BadLine
from minivllm_engine.protocol.records import bad_line_record

if TYPE_CHECKING:
    from minivllm_engine.engine.prepare import PreparedModel
    from minivllm_engine.llm import LLM


class InputChanged(CliError):
    """The input is not what it was when the run began."""

    exit_code = ExitCode.FAILED


@dataclass(frozen=True)
class Batch:
    """One call of `generate`, checked; nothing is written yet. `prepared` is None for a dry run."""

    run: Invocation
    settings: Settings
    flags: GenerateFlags
    model_path: Path
    prepared: "PreparedModel | None"
    source: JobSource
    target: OutputTarget
    tally: Tally
    remedies: Remedies


def run_batch(
    run: Invocation, settings: Settings, flags: GenerateFlags, overrides: Overrides
) -> int:
    """Answer the input. Returns the exit code.

    Raises:
        CliError, EngineError: the run cannot be begun, or could not be finished.
    """
    with ExitStack() as stack:
        batch = check_batch(run, settings, flags, overrides, stack)
        if flags.dry_run:
            return run_dry(run, batch.settings, flags, batch.source, batch.model_path)
        journal = _open_journal(batch, stack)
        scan = scan_input(batch, journal)
        sink = open_sink(batch.target, flags, journal, scan.indices, run.console, stack)
        assert batch.prepared is not None
        watch = cache_watch(
            flags.cache_dump, "generate", batch.settings, batch.prepared, run.console
        )
        try:
            finished = answer_jobs(batch, scan, journal, sink, watch)
            if finished:
                _check_unchanged(batch, scan)
                run.interrupts.activity = "publishing the output"
                sink.finish()
        except KeyboardInterrupt:
            finished = False
        except BaseException:
            sink.stop()
            raise
        if not finished:
            sink.stop()
            watch.warn()
            leave_summary(flags.summary, batch.tally, run.console)
            if batch.tally.num_records or batch.tally.generate_s:
                report_interrupt(run.console, batch.tally, scan, flags, batch.target)
            return run.interrupts.exit_code
        write_summary(flags.summary, batch.tally)
        watch.check()
        advice = batch.remedies.advice(batch.tally)
        code = report_end(run.console, batch.tally, scan, flags, batch.source.source, advice)
        return code if run.interrupts.received is None else run.interrupts.exit_code


def check_batch(
    run: Invocation,
    settings: Settings,
    flags: GenerateFlags,
    overrides: Overrides,
    stack: ExitStack,
) -> Batch:
    """Find out everything that can be found out before the model is touched.

    Raises:
        CliError, EngineError: as `run_batch`.
    """
    source: InputFile | None = None
    tally = Tally(verify=None if flags.verify is None else VerifyCounts())
    selection = Selection.of(flags)
    if flags.input is not None:
        run.interrupts.activity = "reading the input"
        source = InputFile.open(flags.input, run.console)
        stack.callback(source.close)
        if flags.input_format is not InputFormat.TEXT:
            source.check_is_lines()
    target = OutputTarget(None)
    if not flags.dry_run:
        target = _check_files(flags, source)
    run.interrupts.activity = "looking at the model"
    prepared = None
    if flags.dry_run:  # which shows what would be refused
        model_path = engine.find_model(settings.model)
        settings = engine.add_model_sampling(settings, model_path)
        tokenizer = engine.load_tokenizer(model_path)
    else:
        prepared = engine.prepare_model(settings, run.command)
        model_path, tokenizer = prepared.path, prepared.tokenizer
        settings = settings.with_model_sampling(prepared.generation_config.sampling)
    check_thinking(overrides.think, tokenizer, settings.model)
    # inspect-cache reads the same files, but has no such option.
    text_hint = "for plain text: --input-format text" if run.command == "generate" else None
    chat = not flags.raw and tokenizer.has_chat_template
    jobs = JobSource(source, flags, settings, overrides, selection, chat, text_hint)
    device = None if prepared is None else prepared.plan.device
    remedies = Remedies(settings, model_path, device)
    return Batch(run, settings, flags, model_path, prepared, jobs, target, tally, remedies)


def _check_files(flags: GenerateFlags, source: InputFile | None) -> OutputTarget:
    resume = str(flags.resume) if flags.resume else None
    target = check_output(flags.output or "-", source, resume=resume, overwrite=flags.overwrite)
    others = {"--only-failed": flags.only_failed}
    for flag, path, example in (
        ("--summary", flags.summary, "summary.json"),
        ("--cache-dump", flags.cache_dump, "cache.json"),
    ):
        check_side_file(flag, path, example, others, source=source, target=target)
        others[flag] = path
    return target


def _open_journal(batch: Batch, stack: ExitStack) -> Journal | None:
    if not batch.target.is_file:
        return None
    parts = fingerprint_parts(batch.model_path, dtype=batch.settings.get("engine.dtype"))
    journal = Journal.open(
        batch.target.journal_path,
        parts,
        overwrite=batch.flags.overwrite,
        force=batch.flags.resume is Resume.FORCE,
    )
    stack.callback(journal.close)
    return journal


def scan_input(batch: Batch, journal: Journal | None) -> Scan:
    """Read the input once, and name what is wrong with it.

    Raises:
        CliError: it is empty, has bad lines under `--on-error stop`, or answers in `journal` would be lost.
    """
    batch.run.interrupts.activity = "reading the input"
    console, flags = batch.run.console, batch.flags
    stop = flags.on_error is OnError.STOP
    name = batch.source.name
    reports = LineReports(console, name, all_of_them=stop)
    with closing(make_reporter(batch.settings.output.progress, console)) as reporter:
        on_line = _reading_progress(batch.source.source, reporter)
        scan = batch.source.scan(journal, reports.bad, on_line, batch.tally)
    reports.end()
    if scan.total == 0:
        _refuse_nothing(batch, name)
    if journal is not None:
        _refuse_to_lose(journal, scan, console, force=flags.resume is Resume.FORCE)
    if stop and scan.num_bad:
        raise CliError(
            f"{name}: {scan.num_bad} of {scan.total} lines are bad; nothing was run",
            hint="mend them, or --on-error skip",
        )
    if journal is not None and journal.num_resumed:
        again = scan.num_failed_before
        console.note(
            f"resuming: {scan.counted(scan.num_done)} done"
            + (f", {again} failed will be retried" if again else "")
        )
    return scan


def _check_unchanged(batch: Batch, scan: Scan) -> None:
    """Both passes have to have seen the same lines."""
    num_records = batch.tally.num_records
    if num_records != scan.total:
        raise InputChanged(
            f"{batch.source.name} was changed by another process during the run",
            why=f"it had {scan.total} lines to answer, then {num_records}; what was answered is kept",
            hint="the same command again, once the file is as it should be",
        )


def _reading_progress(source: InputFile | None, reporter: Reporter) -> Callable[[], None]:
    """Shows how far a file was read, once that has taken a second."""
    began = time.monotonic()

    def on_line() -> None:
        if source is not None and time.monotonic() - began > 1.0:
            reporter.update(Progress("reading", source.position, source.size, source.name))

    return on_line


def _refuse_nothing(batch: Batch, name: str) -> None:
    flags = batch.flags
    if flags.select or flags.only_failed:
        wanted = ", ".join(flags.select or [f"the failures in {flags.only_failed}"])
        raise CliError(f"no line of {name} has id {wanted}")
    source = batch.source.source
    blank = source.num_blank if source is not None else 0
    raise CliError(
        f"{name} holds no prompts (empty_file)", why=f"{blank} blank lines" if blank else "0 lines"
    )


def _refuse_to_lose(journal: Journal, scan: Scan, console: Console, *, force: bool) -> None:
    """Publishing removes the journal: every answer in it has to be one that this run publishes.

    Args:
        force: lines that changed since they were answered may be answered again.
    """
    outside = journal.num_usable - scan.num_done - scan.num_changed
    changed = 0 if force else scan.num_changed
    if not outside and not changed:
        if scan.num_changed:
            console.warn(f"{scan.num_changed} answered lines changed and are run again")
        return
    parts = [
        f"{outside} are of lines that this run leaves out" if outside else "",
        f"{changed} are of lines that changed, or whose sampling did" if changed else "",
    ]
    again = "" if outside else "--resume force to run the changed lines again, "
    raise CliError(
        f"{journal.path} holds {journal.num_usable} finished answers; this run would lose "
        f"{outside + changed} of them",
        why="; ".join(part for part in parts if part),
        hint=f"the same command as before, {again}or --overwrite to start again",
    )


def answer_jobs(
    batch: Batch, scan: Scan, journal: Journal | None, sink: Sink, watch: CacheWatch
) -> bool:
    """Write a record for every line that has none. False when a signal ended it early.

    Raises:
        CliError, EngineError: the engine cannot be made, or failed; the output cannot be written.
    """
    jobs = batch.source.jobs_left(journal)
    run, flags, tally = batch.run, batch.flags, batch.tally
    if not scan.num_left:
        for job in jobs:
            if not isinstance(job.line, BadLine):
                break  # the file changed since it was scanned
            record = bad_line_record(job.line)
            sink.put(job.position, job.line.index, job.key, record)
            tally.add_record(record)
        watch.without_engine()
        return True
    assert batch.prepared is not None
    reporter = make_reporter(batch.settings.output.progress, run.console)
    began = time.monotonic()
    guard_stdout()
    with loaded(run, batch.settings, batch.prepared, reporter, watch) as llm:
        tally.load_s = time.monotonic() - began
        _warn_of_raw_prompts(batch, scan, llm.tokenizer.has_chat_template)
        builder = PromptBuilder(
            llm.tokenizer,
            llm.max_model_len,
            think=batch.source.overrides.think,
            template_for_prompts=flags.chat_template_for_prompts,
            raw=flags.raw,
            truncate=flags.truncate,
        )
        progress = Progress("generate", scan.num_sequences_done, scan.num_sequences)
        progress.unit = "outputs" if scan.counts_outputs else ""
        verifier = None
        if flags.verify is not None:
            verifier = Verifier(llm, flags.verify, run.console)
            tally.verify = verifier.counts
        loop = RunLoop(
            llm,
            jobs,
            builder,
            sink,
            tally,
            progress,
            reporter,
            batch.remedies,
            LineReports(run.console, batch.source.name),
            strip_thinking=flags.strip_thinking,
            verifier=verifier,
            between_steps=watch.poll,
        )
        began = time.monotonic()
        run.interrupts.activity = "answering"
        try:
            return loop.run(run.console, run.interrupts)
        finally:
            tally.generate_s = time.monotonic() - began
            tally.stats = llm.stats()


@contextmanager
def loaded(
    run: Invocation,
    settings: Settings,
    prepared: "PreparedModel",
    reporter: Reporter,
    watch: CacheWatch,
) -> Iterator["LLM"]:
    """Load the model, showing how far it is, and close it at the end.

    Raises:
        EngineError: the weights cannot be loaded.
        KeyboardInterrupt: a signal came meanwhile.
    """
    run.interrupts.activity = "loading the model"
    with closing(reporter), watch.answering_signals():
        reporter.update(Progress("loading", detail=settings.model))
        with run.interrupts.deferred(), loading_progress(reporter, run.interrupts) as show:
            llm = engine.open_engine(prepared, show)
        with llm, watch.over(llm):
            run.interrupts.check()
            yield llm


def _warn_of_raw_prompts(batch: Batch, scan: Scan, has_template: bool) -> None:
    raw = scan.kinds["prompt"]
    good = scan.total - scan.num_bad
    is_asked_for = batch.flags.chat_template_for_prompts or batch.flags.prompt is not None
    if not raw or is_asked_for or not has_template:
        return
    what = "is a raw prompt" if raw == 1 else "are raw prompts"
    text = f"{raw:,} of {count_text(good, 'line')} {what}, and this model has a chat template"
    hint = "--chat-template-for-prompts, unless that is meant"
    if 2 * raw > good:
        batch.run.console.warn(text, hint)
    else:  # a file may well mix them
        batch.run.console.note(f"{text}: {hint}")
