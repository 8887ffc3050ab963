"""A call of `generate` over many prompts, as it is once everything about it has been checked."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm_cli import engine as engine_factory
from minivllm_cli.batch.flags import GenerateFlags, InputFormat
from minivllm_cli.batch.job_source import JobSource
from minivllm_cli.batch.overrides import Overrides, check_thinking
from minivllm_cli.batch.remedies import Remedies
from minivllm_cli.batch.scan import Selection, failed_ids
from minivllm_cli.batch.tally import Tally
from minivllm_cli.batch.verify import VerifyCounts
from minivllm_cli.command import Invocation
from minivllm_cli.config.settings import Settings
from minivllm_cli.files.input_file import InputFile
from minivllm_cli.files.output_target import (
    OutputTarget,
    check_output,
    check_side_file,
    check_summary,
)
from minivllm_engine.protocol.line_parser import LineParser

if TYPE_CHECKING:
    from minivllm_engine.engine.prepare import PreparedModel


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
            # inspect-cache reads the same files, but has no such option.
            text_hint="for plain text: --input-format text" if run.command == "generate" else None,
        )

    single = None
    if flags.prompt is not None:
        chat = not flags.raw and tokenizer.has_chat_template
        single = make_parser().single(flags.prompt, chat=chat)
    device = None if prepared is None else prepared.plan.device
    remedies = Remedies(settings, model_path, device)
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
