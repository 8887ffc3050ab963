"""A run over many prompts: checks first, then one pass to look, one to answer, and the publication."""

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm_cli import engine_factory
from minivllm_cli.command import Invocation
from minivllm_cli.console import guard_stdout
from minivllm_cli.generate.dry_run import run_dry
from minivllm_cli.generate.fingerprint import fingerprint_parts
from minivllm_cli.generate.flags import GenerateFlags, InputFormat, OnError, Resume
from minivllm_cli.generate.input_file import InputFile
from minivllm_cli.generate.job_source import JobSource
from minivllm_cli.generate.journal import Journal
from minivllm_cli.generate.line_parser import LineParser
from minivllm_cli.generate.line_types import BadLine
from minivllm_cli.generate.output_target import (
    OutputTarget,
    check_output,
    check_side_file,
    check_summary,
)
from minivllm_cli.generate.overrides import Overrides, check_thinking
from minivllm_cli.generate.prompts import PromptBuilder
from minivllm_cli.generate.records import bad_line_record
from minivllm_cli.generate.remedies import Remedies
from minivllm_cli.generate.report import (
    report_bad_lines,
    report_end,
    report_interrupt,
    write_summary,
)
from minivllm_cli.generate.resuming import refuse_to_lose
from minivllm_cli.generate.run_loop import RunLoop
from minivllm_cli.generate.scan import Scan, Selection, failed_ids
from minivllm_cli.generate.sinks import Sink, open_sink
from minivllm_cli.generate.tally import Tally
from minivllm_cli.generate.verify import Verifier, VerifyCounts
from minivllm_cli.inspect_cache.watch import CacheWatch, cache_watch
from minivllm_cli.problems import CliError
from minivllm_cli.progress import Progress, Reporter, loading_progress, make_reporter
from minivllm_cli.settings import Settings

if TYPE_CHECKING:
    from minivllm_engine.prepare import PreparedModel


@dataclass(frozen=True)
class Batch:
    """One call of `generate`, checked; nothing is written yet. `prepared` is None for a dry run."""

    run: Invocation
    settings: Settings
    flags: GenerateFlags
    overrides: Overrides
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
            return run_dry(batch.run, batch.settings, flags, batch.source, batch.model_path)
        journal = _open_journal(batch, stack)
        scan = scan_input(batch, journal)
        sink = open_sink(batch.target, flags, journal, scan.indices, stack)
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
    """Everything that can be found out before the model is touched."""
    source: InputFile | None = None
    tally = Tally(verify=None if flags.verify is None else VerifyCounts())
    selection = _selection(flags)
    if flags.input is not None:
        run.interrupts.activity = "reading the input"
        source = InputFile.open(flags.input, run.console)
        stack.callback(source.close)
    target = OutputTarget(None)
    if not flags.dry_run:
        resume = str(flags.resume) if flags.resume else None
        output = flags.output or "-"
        target = check_output(output, source, resume=resume, overwrite=flags.overwrite)
        check_summary(flags.summary, source, target, flags.only_failed)
        others = {"--only-failed": flags.only_failed, "--summary": flags.summary}
        check_side_file(
            *("--cache-dump", flags.cache_dump, "cache.json", others), source=source, target=target
        )
    run.interrupts.activity = "looking at the model"
    prepared = None
    if flags.dry_run:  # which shows what would be refused
        model_path = engine_factory.find_model(settings.model)
        settings = engine_factory.add_model_sampling(settings, model_path)
        tokenizer = engine_factory.load_tokenizer(model_path)
    else:
        prepared = engine_factory.prepare_model(settings)
        model_path, tokenizer = prepared.path, prepared.tokenizer
        settings = settings.with_model_sampling(prepared.generation_config.sampling)
    check_thinking(overrides.think, tokenizer, settings.model)

    def make_parser() -> LineParser:
        return LineParser(
            as_text=flags.input_format is InputFormat.TEXT,
            defaults=overrides.defaults,
            forced=overrides.forced,
        )

    single = None
    if flags.prompt is not None:
        chat = not flags.raw and tokenizer.has_chat_template
        single = make_parser().single(flags.prompt, chat=chat)
    remedies = Remedies(settings, model_path)
    jobs = JobSource(source, selection, flags, settings, make_parser, overrides.think, single)
    return Batch(
        run, settings, flags, overrides, model_path, prepared, jobs, target, tally, remedies
    )


def _selection(flags: GenerateFlags) -> Selection:
    ids = frozenset(flags.select) if flags.select else None
    if flags.only_failed is not None:
        failed = failed_ids(flags.only_failed)
        ids = failed if ids is None else ids & failed
    return Selection(flags.limit, ids)


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
            f"resuming: {scan.num_done}/{scan.total} done"
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
        with run.interrupts.deferred():
            llm = engine_factory.open_engine(
                batch.prepared, loading_progress(reporter, run.interrupts)
            )
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
            try:
                return loop.run(run.console, run.interrupts)
            finally:
                tally.generate_s = time.monotonic() - began
                tally.stats = llm.stats()


def _warn_of_raw_prompts(batch: Batch, scan: Scan, has_template: bool) -> None:
    raw = scan.kinds["prompt"] + scan.kinds["text"]
    good = scan.total - scan.num_bad
    if has_template and not batch.flags.chat_template_for_prompts and 2 * raw > good:
        if batch.flags.prompt is not None:
            return
        batch.run.console.warn(
            f"{raw} of {good} lines are raw prompts, and this model has a chat template",
            hint="--chat-template-for-prompts, unless they are meant to be raw",
        )
