"""The loop between input, engine and output: a bounded window of requests, each record written at once."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from minivllm_cli.batch.prompts import BuiltPrompt, PromptBuilder
from minivllm_cli.batch.remedies import Remedies
from minivllm_cli.batch.report import MANY_REQUESTS, LineReports
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
from minivllm_engine.protocol.openai_records import join_outputs
from minivllm_engine.protocol.records import bad_line_record, engine_error_record, ok_record
from minivllm_engine.protocol.shapes import usage_record

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
    part: int
    started: bool = False
    output: RequestOutput | None = None


@dataclass
class RunLoop:
    """Runs jobs through an engine.

    Attributes:
        jobs: read lazily; at most twice as many sequences as run at once are held at a time.
        progress: shown and kept up to date; `done` and `total` count sequences.
        verifier: replays some of the answered requests; None replays none.
        between_steps: called while the engine is between two steps.
    """

    llm: "LLM"
    jobs: Iterator[Job]
    builder: PromptBuilder
    sink: Sink
    tally: Tally
    progress: Progress
    reporter: Reporter
    remedies: Remedies
    reports: LineReports
    strip_thinking: bool = False
    verifier: Verifier | None = None
    between_steps: Callable[[], None] = lambda: None
    _running: dict[str, _Running] = field(default_factory=dict)
    _in_flight: int = 0
    # Of lines of several prompts, by position in the run: what was answered so far.
    _parts: dict[int, dict[int, RequestOutput]] = field(default_factory=dict)
    _started_tokens: int = 0
    _reused_tokens: int = 0
    _exhausted: bool = False
    _meter: RateMeter = field(default_factory=RateMeter)
    _shown_at: float = 0.0
    _shows_pools: bool = True
    _stop_at: float | None = None
    # After a signal: the requests that may still finish.
    _last: frozenset[str] | None = None

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

        self._shows_pools = console.verbosity > 0 or self.progress.total >= MANY_REQUESTS
        with interrupts.stopping_with(on_signal):
            self._show()
            while self._stop_at is None:
                self._feed()
                if not self._running and not self._replaying:
                    self.reports.end()
                    return True
                if self._stop_at is None:  # a signal may have come while prompts were read
                    self._step()
            return self._drain()

    def _begun(self) -> frozenset[str]:
        """Requests that the engine computes, or has computed a part of."""
        # News of what runs come a step later on a GPU; what was preempted waits, and has begun.
        begun = {key for key, running in self._running.items() if running.started}
        return frozenset(begun | (self.llm.running_ids & self._running.keys()))

    @property
    def _replaying(self) -> int:
        return 0 if self.verifier is None else self.verifier.num_sequences

    def _drain(self) -> bool:
        if self.verifier is not None:
            self.verifier.stop()
        for request_id in list(self._running):
            if not self._may_finish(request_id):
                self._drop(request_id)
        while self._running and time.monotonic() < (self._stop_at or 0.0):
            self._step()
        for request_id in list(self._running):
            self._drop(request_id)
        # Whether everything was answered after all: nothing dropped, nothing left to read.
        return self._exhausted and self.progress.done == self.progress.total

    def _may_finish(self, request_id: str) -> bool:
        return self._last is None or request_id in self._last

    def _drop(self, request_id: str) -> None:
        self.llm.abort(request_id)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._in_flight -= self._running.pop(request_id).params.n

    def _feed(self) -> None:
        window = 2 * (self.llm.config.engine.max_num_seqs or 1)
        while not self._exhausted and self._stop_at is None:
            if self._in_flight + self._replaying >= window:
                return
            job = next(self.jobs, None)
            if job is None:
                self._exhausted = True
            elif isinstance(job.line, BadLine):
                self._write(job, bad_line_record(job.line), sequences=1)
            else:
                self._add(job, job.line)

    def _add(self, job: Job, line: RequestLine) -> None:
        assert job.params is not None
        num_tokens: int | None = None
        added: list[str] = []
        try:
            for part, one in enumerate(line.parts):
                num_tokens = None
                params = replace(job.params, seed=job.params.seed ^ part)
                prompt = self.builder.build(one, params)
                num_tokens = len(prompt.ids)
                name = f"{job.position}.{part}" if part else str(job.position)
                if prompt.score is not None:
                    added.append(self.llm.add_score(prompt.score, request_id=name))
                else:
                    asked = prompt.request
                    if self.verifier is not None:
                        asked = self.verifier.asking(asked)
                    added.append(self.llm.add_request(asked, request_id=name))
                self._running[name] = _Running(job, line, job.params, prompt, part)
                self._in_flight += job.params.n
        except RequestError as error:
            for name in added:
                self._drop(name)
            hint = error.hint
            if error.code == "prompt_too_long" and num_tokens is not None:
                hint = self.remedies.for_long_prompt(num_tokens)
            self.reports.refused(line, error, hint)
            usage = None if num_tokens is None else {"prompt_tokens": num_tokens}
            record = engine_error_record(line, error, hint, usage=usage)
            self._write(job, record, sequences=line.num_sequences)

    def _step(self) -> None:
        for output in self._engine_step():
            if self.verifier is not None and self.verifier.take(output):
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
        if (self._running or self._replaying) and not self.llm.has_unfinished:
            raise EngineDied("engine failed: it lost requests", why=", ".join([*self._running][:5]))
        self.between_steps()
        self._show()

    def _engine_step(self) -> list[RequestOutput]:
        try:
            return self.llm.step()
        except Exception as error:
            message = " ".join(str(error).split()) or type(error).__name__
            progress = self.progress
            unit = f" {progress.unit}" if progress.unit else ""
            raise EngineDied(
                f"engine failed: {message} in step {self.llm.stats().num_steps}",
                why=f"{type(error).__name__}; {progress.done:,} of {progress.total:,}{unit} done",
            ) from error

    def _finish(self, running: _Running, output: RequestOutput) -> None:
        self.tally.add_output(output)
        if self.verifier is not None:
            asked = running.prompt.score or running.prompt.request
            self.verifier.consider(running.job, asked, output)
            output = self.verifier.as_asked(output, running.params)
        whole = self._with_other_parts(running, output)
        if whole is None:
            return
        output = whole
        tokenizer = self.llm.tokenizer
        if output.error is not None:
            record = engine_error_record(
                running.line,
                output.error,
                output.error.hint,
                usage=usage_record(output.usage, tokenizer),
            )
        else:
            self.tally.num_truncated += running.prompt.truncated > 0
            record = ok_record(
                running.line,
                output,
                params=running.params,
                tokenizer=tokenizer,
                truncated=running.prompt.truncated,
                strip_thinking=self.strip_thinking,
            )
        self._write(running.job, record, sequences=running.line.num_sequences)

    def _with_other_parts(self, running: _Running, output: RequestOutput) -> RequestOutput | None:
        """The answer to all prompts of the line; None while some of them run."""
        num_parts = len(running.line.parts)
        if num_parts == 1:
            return output
        done = self._parts.setdefault(running.job.position, {})
        done[running.part] = output
        if len(done) < num_parts:
            return None
        del self._parts[running.job.position]
        return join_outputs([done[part] for part in range(num_parts)])

    def _write(self, job: Job, record: dict[str, Any], *, sequences: int) -> None:
        self.sink.put(job.position, job.line.index, job.key, record)
        self.tally.add_record(record)
        self.progress.done += sequences
        self.progress.failed = self.tally.num_failed

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._shown_at < _SHOW_SECONDS and self.progress.done < self.progress.total:
            return
        self._shown_at = now
        stats = self.llm.stats()
        self.tally.stats = stats
        self._meter.add(stats.output_tokens, stats.prompt_tokens_computed, now)
        progress = self.progress
        progress.out_tok_s, progress.in_tok_s = self._meter.rates()
        progress.stats = stats if self._shows_pools else None
        if stats.snapshots_total and self._started_tokens:
            progress.hit = self._reused_tokens / self._started_tokens
        progress.prefill = self._long_prefill()
        ended = self.tally.num_outputs
        progress.mean_length = self.tally.out_tokens / ended if ended else None
        progress.eta_s = self._eta()
        self.reporter.update(progress)

    def _long_prefill(self) -> tuple[int, int] | None:
        for running in self._running.values():
            total = len(running.prompt.ids)
            if total < LONG_PROMPT or not running.started or running.output is None:
                continue
            if running.output.num_prompt_computed < total:
                return running.output.num_prompt_computed, total
        return None

    def _eta(self) -> float | None:
        # From the tokens that are still to come, guessed from those that came: requests differ too much.
        progress = self.progress
        if not progress.mean_length or progress.out_tok_s <= 0:
            return None
        if self._meter.seconds < _SETTLED_SECONDS:
            return None
        left = (progress.total - progress.done) * progress.mean_length
        for running in self._running.values():
            if running.output is not None:
                # One that outlived the mean is taken to have no more than a token before it.
                lengths = (len(out.token_ids) for out in running.output.outputs)
                left -= sum(min(length, progress.mean_length - 1) for length in lengths)
        return max(left, 0.0) / progress.out_tok_s
