"""`--prompt`: one answer, streamed to stdout as it comes; the text and its end, nothing else."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minivllm_cli import engine
from minivllm_cli.batch.flags import GenerateFlags
from minivllm_cli.batch.prompts import Overrides, PromptBuilder, check_thinking
from minivllm_cli.batch.remedies import Remedies
from minivllm_cli.batch.report import leave_summary, write_summary
from minivllm_cli.batch.run import loaded
from minivllm_cli.batch.tally import Tally
from minivllm_cli.cache_dump.watch import CacheWatch, cache_watch
from minivllm_cli.command import Invocation
from minivllm_cli.config.settings import Settings
from minivllm_cli.console.progress import LONG_PROMPT, Progress, Reporter, make_reporter
from minivllm_cli.console.streams import Console, Results, claim_stdout, strip_controls
from minivllm_cli.errors import ExitCode, Problem
from minivllm_cli.files.output_target import check_side_file
from minivllm_engine.core.errors import RequestError
from minivllm_engine.core.outputs import FinishReason, RequestOutput
from minivllm_engine.core.units import count_text
from minivllm_engine.protocol.line_parser import LineParser

if TYPE_CHECKING:
    from minivllm_engine.engine.prepare import PreparedModel


def stream_prompt(
    run: Invocation, settings: Settings, flags: GenerateFlags, overrides: Overrides
) -> int:
    """Answer `--prompt` on stdout. Returns the exit code.

    Raises:
        CliError, EngineError: the model cannot be loaded, the request is refused, stdout fails.
    """
    run.interrupts.activity = "looking at the model"
    check_side_file("--summary", flags.summary, "summary.json", {})
    check_side_file("--cache-dump", flags.cache_dump, "cache.json", {"--summary": flags.summary})
    if settings.get("engine.max_num_seqs") is None:  # pools for what there is to do
        settings = settings.with_value("engine.max_num_seqs", 1)
    prepared = engine.prepare_model(settings)
    check_thinking(overrides.think, prepared.tokenizer, settings.model)
    settings = settings.with_model_sampling(prepared.generation_config.sampling)
    tally = Tally()
    watch = cache_watch(flags.cache_dump, "generate", settings, prepared, run.console)
    try:
        last = _answer(run, prepared, settings, flags, overrides, watch, tally)
    except KeyboardInterrupt:
        leave_summary(flags.summary, tally, run.console)
        raise
    tally.add_output(last)
    code = _report(run.console, last, tally)
    write_summary(flags.summary, tally)
    watch.check()
    return code


def _answer(
    run: Invocation,
    prepared: "PreparedModel",
    settings: Settings,
    flags: GenerateFlags,
    overrides: Overrides,
    watch: CacheWatch,
    tally: Tally,
) -> RequestOutput:
    """Load the model, and let it answer on stdout."""
    results = claim_stdout()
    reporter = make_reporter(settings.output.progress, run.console)
    with loaded(run, settings, prepared, reporter, watch) as llm:
        builder = PromptBuilder(
            llm.tokenizer, llm.max_model_len, think=overrides.think, truncate=flags.truncate
        )
        tally.load_s = time.monotonic() - tally.started
        reporter.close()
        run.interrupts.activity = "answering"
        parser = LineParser(defaults=overrides.defaults, forced=overrides.forced)
        chat = not flags.raw and llm.tokenizer.has_chat_template
        line = parser.single(flags.prompt or "", chat=chat)
        params = settings.sampling(line.params)
        prompt = builder.build(line, params)
        if builder.is_too_long(prompt):
            remedies = Remedies(settings, prepared.path, prepared.plan.device)
            raise RequestError(
                f"{len(prompt.ids)} prompt tokens + 1 > max_model_len {llm.max_model_len}",
                hint=remedies.for_long_prompt(len(prompt.ids)),
                code="prompt_too_long",
            )
        shows_reasoning = not flags.strip_thinking and run.console.live and not run.console.quiet
        writer = _Writer(run.console, results, reporter, flags.separator_bytes, shows_reasoning)
        last: RequestOutput | None = None
        try:
            for last in llm.stream(prompt.request):
                writer.take(last, len(prompt.ids))
                watch.poll()
        finally:
            writer.end()
            tally.generate_s = time.monotonic() - tally.started - tally.load_s
            tally.stats = llm.stats()
        assert last is not None, "a stream yields at least its end"
        return last


@dataclass
class _Writer:
    """Text to stdout; while there is none yet, reasoning and the progress of a long prompt to stderr."""

    console: Console
    results: Results
    reporter: Reporter
    terminator: bytes
    shows_reasoning: bool
    _reasoning: bool = False
    _written: bool = False

    def take(self, output: RequestOutput, prompt_length: int) -> None:
        computed = output.num_prompt_computed
        if prompt_length >= LONG_PROMPT and computed < prompt_length:
            self.reporter.update(Progress("prompt", computed, prompt_length))
            return
        self.reporter.close()
        if not output.outputs:
            return
        news = output.outputs[0]
        if news.reasoning_delta and self.shows_reasoning:
            self._reasoning = True
            self.console.write(strip_controls(news.reasoning_delta))
        if news.text_delta:
            self._close_reasoning()
            self._written = True
            self.results.write_text(news.text_delta)

    def end(self) -> None:
        """End the line: the answer is over, or was broken off."""
        self._close_reasoning()
        if self._written:
            self.results.write(self.terminator)

    def _close_reasoning(self) -> None:
        if self._reasoning:
            self._reasoning = False
            self.console.write("\n")


def _report(console: Console, last: RequestOutput, tally: Tally) -> ExitCode:
    if last.error is not None:
        tally.failed[last.error.code] += 1
        console.error(Problem(last.error.what, why=last.error.why, hint=last.error.hint))
        return ExitCode.SOME_REQUESTS_FAILED
    tally.num_ok += 1
    tally.ended[str(last.finish_reason)] += 1
    if last.finish_reason is FinishReason.LENGTH:
        console.warn(
            f"stopped at max_tokens after {count_text(last.usage.completion_tokens, 'token')}"
        )
    elif last.finish_reason is FinishReason.CONTEXT:
        console.warn("stopped at the end of the context", hint="--max-model-len N")
    return ExitCode.OK
