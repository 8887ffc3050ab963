"""A run over many prompts: checks first, then one pass to look, one to answer, and the publication."""

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from minivllm_cli import engine
from minivllm_cli.batch.checked_batch import Batch, check_batch
from minivllm_cli.batch.dry_run import run_dry
from minivllm_cli.batch.flags import GenerateFlags, OnError, Resume
from minivllm_cli.batch.overrides import Overrides
from minivllm_cli.batch.prompts import PromptBuilder
from minivllm_cli.batch.report import (
    leave_summary,
    report_bad_lines,
    report_end,
    report_interrupt,
    write_summary,
)
from minivllm_cli.batch.resuming import refuse_to_lose
from minivllm_cli.batch.run_loop import RunLoop
from minivllm_cli.batch.scan import Scan
from minivllm_cli.batch.sinks import Sink, open_sink
from minivllm_cli.batch.verify import Verifier
from minivllm_cli.cache_dump.watch import CacheWatch, cache_watch
from minivllm_cli.command import Invocation
from minivllm_cli.config.settings import Settings
from minivllm_cli.console.progress import Progress, Reporter, loading_progress, make_reporter
from minivllm_cli.console.streams import guard_stdout
from minivllm_cli.errors import CliError
from minivllm_cli.files.fingerprint import fingerprint_parts
from minivllm_cli.files.input_file import InputFile
from minivllm_cli.files.journal import Journal
from minivllm_engine.core.units import count_text
from minivllm_engine.protocol.lines import BadLine
from minivllm_engine.protocol.records import bad_line_record

if TYPE_CHECKING:
    pass


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
            return run_dry(batch.run, batch.settings, flags, batch.source, batch.model_path)
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
    batch.run.interrupts.activity = "reading the input"
    console, flags = batch.run.console, batch.flags
    stop = flags.on_error is OnError.STOP
    name = batch.source.source.name if batch.source.source is not None else "--prompt"
    reporter = make_reporter(batch.settings.output.progress, console)
    try:
        with report_bad_lines(console, name, all_of_them=stop) as on_bad:
            on_line = _reading_progress(batch.source.source, reporter)
            scan = batch.source.scan(journal, on_bad, on_line, batch.tally)
    finally:
        reporter.close()
    if scan.total == 0:
        _refuse_nothing(batch, name)
    if journal is not None:
        refuse_to_lose(journal, scan, batch.run.console, force=flags.resume is Resume.FORCE)
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
    blank = source.count_blank_lines() if source is not None else 0
    raise CliError(
        f"{name} holds no prompts (empty_file)", why=f"{blank} blank lines" if blank else "0 lines"
    )


def answer_jobs(
    batch: Batch, scan: Scan, journal: Journal | None, sink: Sink, watch: CacheWatch
) -> bool:
    """Write a record for every line that has none. False when a signal ended it early."""
    jobs = batch.source.jobs_left(journal)
    if not scan.num_left:
        for job in jobs:
            assert isinstance(job.line, BadLine)
            record = bad_line_record(job.line)
            sink.put(job.position, job.line.index, job.key, record)
            batch.tally.add_record(record)
        watch.without_engine()
        return True
    run, flags, tally = batch.run, batch.flags, batch.tally
    assert batch.prepared is not None
    reporter = make_reporter(batch.settings.output.progress, run.console)
    run.interrupts.activity = "loading the model"
    began = time.monotonic()
    guard_stdout()
    with closing(reporter), watch.answering_signals():
        reporter.update(Progress("loading", detail=batch.settings.model))
        with run.interrupts.deferred(), loading_progress(reporter, run.interrupts) as show:
            llm = engine.open_engine(batch.prepared, show)
        with llm, watch.over(llm):
            run.interrupts.check()
            tally.load_s = time.monotonic() - began
            _warn_of_raw_prompts(batch, scan, llm.tokenizer.has_chat_template)
            builder = PromptBuilder(
                llm.tokenizer,
                llm.max_model_len,
                think=batch.overrides.think,
                template_for_prompts=flags.chat_template_for_prompts,
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


def _warn_of_raw_prompts(batch: Batch, scan: Scan, has_template: bool) -> None:
    raw = scan.kinds["prompt"] + scan.kinds["text"]
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
