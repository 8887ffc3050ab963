"""The loop between input, engine and output: a bounded window of requests, each record written at once."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm_cli.batch.prompts import BuiltPrompt, PromptBuilder
from minivllm_cli.batch.remedies import Remedies
from minivllm_cli.batch.report import LineReports
from minivllm_cli.batch.sinks import Sink
from minivllm_cli.batch.tally import Tally
from minivllm_cli.batch.verify import Verifier
from minivllm_cli.console.progress import LONG_PROMPT, Progress, RateMeter, Reporter
from minivllm_cli.console.signals import CLEAN_UP_SECONDS, Interrupts
from minivllm_cli.console.streams import Console
from minivllm_cli.errors import EngineDied
from minivllm_engine.core.errors import RequestError
from minivllm_engine.core.outputs import RequestOutput
from minivllm_engine.core.sampling_params import ResolvedSampling
from minivllm_engine.protocol.lines import BadLine, Job, RequestLine
from minivllm_engine.protocol.records import bad_line_record, engine_error_record, ok_record
from minivllm_engine.protocol.usage_record import usage_record

if TYPE_CHECKING:
    from minivllm_engine.llm import LLM

_SHOW_SECONDS = 0.1
_SETTLED_SECONDS = 1.0


@dataclass(slots=True)
class _Running:
    job: Job
    line: RequestLine
    params: ResolvedSampling
    prompt: BuiltPrompt
    started: bool = False
    output: RequestOutput | None = None


class RunLoop:
    """Runs jobs through an engine.

    Args:
        jobs: read lazily; at most `window` sequences are held at a time.
        progress: shown and kept up to date; `done` and `total` count sequences.
        verifier: replays some of the answered requests; None replays none.
        between_steps: called while the engine is between two steps.
    """

    def __init__(
        self,
        llm: "LLM",
        jobs: Iterator[Job],
        builder: PromptBuilder,
        sink: Sink,
        tally: Tally,
        progress: Progress,
        reporter: Reporter,
        remedies: Remedies,
        reports: LineReports,
        *,
        strip_thinking: bool = False,
        verifier: Verifier | None = None,
        between_steps: Callable[[], None] = lambda: None,
    ) -> None:
        self._llm = llm
        self._jobs = jobs
        self._builder = builder
        self._sink = sink
        self._tally = tally
        self._progress = progress
        self._reporter = reporter
        self._remedies = remedies
        self._reports = reports
        self._strip_thinking = strip_thinking
        self._verifier = verifier
        self._between_steps = between_steps
        self._window = 2 * (llm.config.engine.max_num_seqs or 1)
        self._running: dict[str, _Running] = {}
        self._in_flight = 0
        self._started_tokens = 0
        self._reused_tokens = 0
        self._exhausted = False
        self._meter = RateMeter()
        self._shown_at = 0.0
        self._stop_at: float | None = None
        # After a signal: the requests that may still finish.
        self._last: frozenset[str] | None = None

    def run(self, console: Console, interrupts: Interrupts) -> bool:
        """Run all jobs. True when done; False when a signal ended the run early.

        The first signal lets running requests finish for a while, the second raises KeyboardInterrupt.

        Raises:
            KeyboardInterrupt: the second signal.
            OutputFailed, OutputClosed: the output cannot be written.
            EngineDied: the engine failed as a whole.
        """

        def on_signal(count: int) -> None:
            if count > 1:
                interrupts.limit_clean_up(0)
                raise KeyboardInterrupt
            interrupts.limit_clean_up()
            self._last = self._begun()
            self._stop_at = time.monotonic() + CLEAN_UP_SECONDS
            console.write_line(
                f"stopping: no new requests; finishing {len(self._last)} running "
                f"(up to {CLEAN_UP_SECONDS:.0f} s). Ctrl-C again to abort now."
            )

        with interrupts.stopping_with(on_signal):
            self._show()
            while self._stop_at is None:
                self._feed()
                if not self._running and not self._replaying:
                    self._reports.end()
                    return True
                if self._stop_at is None:  # a signal may have come while prompts were read
                    self._step()
            return self._drain()

    def _begun(self) -> frozenset[str]:
        """Requests that the engine computes, or has computed a part of."""
        # News of what runs come a step later on a GPU; what was preempted waits, and has begun.
        begun = {key for key, running in self._running.items() if running.started}
        return frozenset(begun | (self._llm.running_ids & self._running.keys()))

    @property
    def _replaying(self) -> int:
        return 0 if self._verifier is None else self._verifier.num_sequences

    def _drain(self) -> bool:
        if self._verifier is not None:
            self._verifier.stop()
        for request_id in list(self._running):
            if not self._may_finish(request_id):
                self._drop(request_id)
        while self._running and time.monotonic() < (self._stop_at or 0.0):
            self._step()
        for request_id in list(self._running):
            self._drop(request_id)
        # Whether everything was answered after all: nothing dropped, nothing left to read.
        return self._exhausted and self._progress.done == self._progress.total

    def _may_finish(self, request_id: str) -> bool:
        return self._last is None or request_id in self._last

    def _drop(self, request_id: str) -> None:
        self._llm.abort(request_id)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._in_flight -= self._running.pop(request_id).params.n

    def _feed(self) -> None:
        while not self._exhausted and self._stop_at is None:
            if self._in_flight + self._replaying >= self._window:
                return
            job = next(self._jobs, None)
            if job is None:
                self._exhausted = True
            elif isinstance(job.line, BadLine):
                self._write(job, bad_line_record(job.line), sequences=1)
            else:
                self._add(job, job.line)

    def _add(self, job: Job, line: RequestLine) -> None:
        assert job.params is not None
        num_tokens: int | None = None
        try:
            prompt = self._builder.build(line, job.params)
            num_tokens = len(prompt.ids)
            asked = prompt.request
            if self._verifier is not None:
                asked = self._verifier.asking(asked)
            request_id = self._llm.add_request(asked, request_id=str(job.position))
        except RequestError as error:
            hint = error.hint
            if error.code == "prompt_too_long" and num_tokens is not None:
                hint = self._remedies.for_long_prompt(num_tokens)
            self._reports.refused(line, error, hint)
            usage = None if num_tokens is None else {"prompt_tokens": num_tokens}
            record = engine_error_record(line, error, hint, usage=usage)
            self._write(job, record, sequences=job.params.n)
            return
        self._running[request_id] = _Running(job, line, job.params, prompt)
        self._in_flight += job.params.n

    def _step(self) -> None:
        for output in self._engine_step():
            if self._verifier is not None and self._verifier.take(output):
                continue
            running = self._running.get(output.request_id)
            if running is None:
                continue
            if not self._may_finish(output.request_id):
                # Let in by the step that a signal came into.
                if output.finished:
                    self._forget(output.request_id)
                continue
            if not running.started:
                running.started = True
                self._started_tokens += output.usage.prompt_tokens
                self._reused_tokens += output.usage.cached_tokens
            running.output = output
            if output.finished:
                self._forget(output.request_id)
                self._finish(running, output)
        if (self._running or self._replaying) and not self._llm.has_unfinished:
            raise EngineDied("engine failed: it lost requests", why=", ".join([*self._running][:5]))
        self._between_steps()
        self._show()

    def _engine_step(self) -> list[RequestOutput]:
        try:
            return self._llm.step()
        except Exception as error:
            message = " ".join(str(error).split()) or type(error).__name__
            progress = self._progress
            unit = f" {progress.unit}" if progress.unit else ""
            raise EngineDied(
                f"engine failed: {message} in step {self._llm.stats().num_steps}",
                why=f"{type(error).__name__}; {progress.done:,} of {progress.total:,}{unit} done",
            ) from error

    def _finish(self, running: _Running, output: RequestOutput) -> None:
        self._tally.add_output(output)
        if self._verifier is not None:
            self._verifier.consider(running.job, running.prompt.request, output)
            output = self._verifier.as_asked(output, running.params)
        token_text = self._llm.tokenizer.token_text
        if output.error is not None:
            record = engine_error_record(
                running.line,
                output.error,
                output.error.hint,
                usage=usage_record(output.usage, token_text),
            )
        else:
            self._tally.num_truncated += running.prompt.truncated > 0
            record = ok_record(
                running.line,
                output,
                params=running.params,
                token_text=token_text,
                truncated=running.prompt.truncated,
                strip_thinking=self._strip_thinking,
            )
        self._write(running.job, record, sequences=running.params.n)

    def _write(self, job: Job, record: dict[str, Any], *, sequences: int) -> None:
        self._sink.put(job.position, job.line.index, job.key, record)
        self._tally.add_record(record)
        self._progress.done += sequences
        self._progress.failed = self._tally.num_failed

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._shown_at < _SHOW_SECONDS and self._progress.done < self._progress.total:
            return
        self._shown_at = now
        stats = self._llm.stats()
        self._tally.stats = stats
        self._meter.add(stats.output_tokens, stats.prompt_tokens_computed, now)
        progress = self._progress
        progress.out_tok_s, progress.in_tok_s = self._meter.rates()
        progress.stats = stats
        if stats.snapshots_total and self._started_tokens:
            progress.hit = self._reused_tokens / self._started_tokens
        progress.prefill = self._long_prefill()
        progress.mean_length = self._mean_length()
        progress.eta_s = self._eta()
        self._reporter.update(progress)

    def _long_prefill(self) -> tuple[int, int] | None:
        for running in self._running.values():
            total = len(running.prompt.ids)
            if total < LONG_PROMPT or not running.started or running.output is None:
                continue
            if running.output.num_prompt_computed < total:
                return running.output.num_prompt_computed, total
        return None

    def _mean_length(self) -> float | None:
        ended = self._tally.num_outputs
        return self._tally.out_tokens / ended if ended else None

    def _eta(self) -> float | None:
        # From the tokens that are still to come, guessed from those that came: requests differ too much.
        mean, rate = self._progress.mean_length, self._progress.out_tok_s
        if mean is None or rate <= 0 or self._meter.seconds < _SETTLED_SECONDS:
            return None
        waiting = self._progress.total - self._progress.done - self._in_flight
        left = waiting * mean
        for running in self._running.values():
            outputs = running.output.outputs if running.output is not None else []
            lengths = [len(out.token_ids) for out in outputs] or [0] * running.params.n
            left += sum(_expected_rest(n, mean, running.params.max_tokens) for n in lengths)
        return left / rate


def _expected_rest(length: int, mean: float, limit: int) -> float:
    # One that outlived the mean is taken to have as much again before it, up to its limit.
    return mean - length if length < mean else min(mean, max(limit - length, 0))
