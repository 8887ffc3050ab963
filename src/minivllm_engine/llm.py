"""LLM: the engine's loop and its public face."""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from minivllm_engine.answer import Answer
from minivllm_engine.block_manager import BlockManager
from minivllm_engine.cache_report import CacheReport, cache_report
from minivllm_engine.config import EngineConfig
from minivllm_engine.deltanet_state import DeltaNetStateManager
from minivllm_engine.errors import ConfigError, EngineError, RequestError
from minivllm_engine.load_report import LoadReport
from minivllm_engine.model_runner import ModelRunner, Progress
from minivllm_engine.prefix_cache import PrefixCache
from minivllm_engine.prepare import PreparedModel, prepare
from minivllm_engine.prompt import Prompt, read_prompt
from minivllm_engine.request import (
    CacheUse,
    FinishReason,
    PositionLogprobs,
    Request,
    RequestOutput,
    ResolvedSampling,
    SamplingParams,
    Timing,
    Usage,
)
from minivllm_engine.sampler import Sampled, SamplingRow, sample
from minivllm_engine.scheduler import ScheduledBatch, Scheduler
from minivllm_engine.stats import EngineStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that was launched and not yet collected: what it yields, or why it failed."""

    batch: ScheduledBatch
    sampled: tuple[Sampled | None, ...]
    scored: tuple[PositionLogprobs | None, ...] = ()
    failure: Exception | None = None


class LLM:
    """A model with its engine. Not thread-safe; one thread calls everything.

    Args:
        model: a directory that holds a checkpoint, or "demo"; or what `prepare` made of one.
        engine, cache, sampling: the sections of the YAML config, as mappings.
        config: all sections at once, instead of them.
        progress: called as (phase, done, total) while the model loads.

    Raises:
        CheckpointError, ConfigError, CapacityError, BackendUnavailable: before weights are loaded,
            wherever it can be known by then.
    """

    def __init__(
        self,
        model: str | Path | PreparedModel = "demo",
        *,
        engine: Mapping[str, Any] | None = None,
        cache: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
    ) -> None:
        sections = {"engine": engine, "cache": cache, "sampling": sampling}
        given = {name: values for name, values in sections.items() if values is not None}
        if isinstance(model, PreparedModel):
            if given or config is not None:
                raise ConfigError("a prepared model has its config already")
            prepared = model
        else:
            if given and config is not None:
                raise ConfigError(f"config and {', '.join(given)} exclude each other")
            prepared = prepare(model, config or EngineConfig.create(**given))
        self.model_path = prepared.path
        self.model_config = prepared.model_config
        self.tokenizer = prepared.tokenizer
        self.generation_config = prepared.generation_config
        self.config = prepared.config
        self.stop_token_ids = prepared.end_ids
        self._plan = prepared.plan
        began = time.perf_counter()
        self._runner: ModelRunner | None = ModelRunner(
            prepared.index,
            self.model_config,
            self._plan,
            device=torch.device("cpu"),
            progress=progress,
        )
        self.load_report = LoadReport(weights_s=time.perf_counter() - began)
        self._cache = PrefixCache(
            BlockManager(self._plan.num_blocks, self._plan.block_size),
            DeltaNetStateManager(self._plan.max_num_seqs, self._plan.num_snapshots),
            model_id=f"{self.model_path} {self._plan.dtype} {self._plan.state_dtype}",
            enabled=self.config.cache.prefix_cache and self._plan.num_snapshots > 0,
        )
        self._scheduler = Scheduler(
            self._cache, max_num_batched_tokens=self._plan.max_num_batched_tokens
        )
        self._answers: dict[str, Answer] = {}
        self._undelivered: list[RequestOutput] = []
        self._num_added = 0
        self._num_arrived = 0
        self._prompt_tokens_computed = 0
        self._output_tokens = 0
        self._bound_steps: Counter[str] = Counter()

    # -- requests --------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Longest sequence: prompt and output together."""
        return self._plan.max_model_len

    @property
    def device(self) -> str:
        """Where the model runs: "cpu" or "cuda"."""
        return self.config.engine.device

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Batch sizes whose decode steps are replayed from a CUDA graph; () where there are none."""
        return self.load_report.graph_sizes

    def use_graphs(self, enabled: bool) -> None:
        """Replay decode steps from graphs, or run them eagerly, from the next step on.

        Raises:
            ConfigError: there are no graphs to use.
        """
        if enabled and not self.graph_sizes:
            raise ConfigError("there are no CUDA graphs", why=f"this engine runs on {self.device}")

    @property
    def has_unfinished(self) -> bool:
        return bool(self._answers or self._undelivered)

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> str:
        """Queue a request for `step`. Returns its id.

        Raises:
            RequestError: it can never be served; code `empty_prompt`, `prompt_too_long`,
                `does_not_fit` or `invalid_field`.
        """
        return self._add(prompt, params, request_id=request_id, place=self._num_added)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, with what it has. None where there is no such request (any more)."""
        answer = self._answers.pop(request_id, None)
        if answer is None:
            return None
        for request in answer.requests:
            self._scheduler.finish(request)
        answer.end_all(FinishReason.ABORT)
        self._undelivered = [out for out in self._undelivered if out.request_id != request_id]
        return answer.snapshot()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts, in order. A bad prompt gives an output with `error` set.

        Args:
            prompts: one, or a list of them; a list of integers is one prompt.
            params: for all prompts, or one a prompt.
        """
        many: list[Any] = list(prompts) if _is_batch(prompts) else [prompts]
        each: list[Any] = list(params) if isinstance(params, list | tuple) else [params] * len(many)
        if len(each) != len(many):
            raise ConfigError(f"{len(many)} prompts but {len(each)} sampling params")
        results: dict[str, RequestOutput] = {}
        ids = []
        try:
            for place, (prompt, one) in enumerate(zip(many, each, strict=True)):
                request_id = self._new_id(None)
                ids.append(request_id)
                try:
                    self._add(prompt, one, request_id=request_id, place=place)
                except RequestError as error:
                    results[request_id] = _refused(request_id, error)
            wanted = set(ids)
            while len(results) < len(ids):
                for out in self._step_for(wanted):
                    if out.finished:
                        results[out.request_id] = out
        finally:
            for request_id in ids:
                self.abort(request_id)
        return [results[request_id] for request_id in ids]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Answer one prompt as it comes; the last output is finished. Closing the iterator aborts.

        Raises:
            RequestError: as `add_request`, at the first `next`.
        """
        request_id = self._add(prompt, params, request_id=None, place=self._num_added)
        try:
            while request_id in self._answers:
                yield from self._step_for({request_id})
        finally:
            self.abort(request_id)

    def _new_id(self, request_id: str | None) -> str:
        return request_id if request_id is not None else f"request-{self._num_added}"

    def _add(
        self, prompt: Prompt, params: SamplingParams | None, *, request_id: str | None, place: int
    ) -> str:
        self._open_runner()
        request_id = self._new_id(request_id)
        if not isinstance(params, SamplingParams | None):
            raise RequestError(
                f"params: {type(params).__name__} is no SamplingParams",
                hint="SamplingParams(max_tokens=...)",
            )
        if request_id in self._answers:
            raise RequestError(f"request id {request_id!r} is in use")
        self._num_added += 1
        ids, is_chat = read_prompt(prompt, self.tokenizer)
        resolved = (params or SamplingParams()).resolved(
            self.config.sampling,
            self.generation_config.sampling,
            seed=self.config.sampling.seed + place,
        )
        self._check(ids, resolved)
        answer_at = self.tokenizer.answer_start(ids) if is_chat else None
        total = min(len(ids) + resolved.max_tokens, self.max_model_len)
        requests = [
            Request(
                request_id,
                tuple(ids),
                resolved,
                self._num_arrived + i,
                index=i,
                max_total_tokens=total,
                answer_at=answer_at,
            )
            for i in range(resolved.n)
        ]
        self._num_arrived += len(requests)
        end_ids = frozenset() if resolved.ignore_eos else self.stop_token_ids
        self._answers[request_id] = Answer(
            request_id, requests, self.tokenizer, end_ids, split_reasoning=is_chat
        )
        for request in requests:
            self._scheduler.add(request)
        return request_id

    def _check(self, ids: Sequence[int], params: ResolvedSampling) -> None:
        vocab = self.model_config.vocab_size
        if not ids:
            raise RequestError("the prompt is empty", code="empty_prompt")
        for what, some in (
            ("prompt token id", ids),
            ("logit_bias id", params.logit_bias),
            ("stop_token_ids id", params.stop_token_ids),
        ):
            wrong = next((i for i in some if not 0 <= i < vocab), None)
            if wrong is not None:
                raise RequestError(
                    f"{what} {wrong} is out of range", why=f"the model has ids 0 to {vocab - 1}"
                )
        if params.min_tokens > params.max_tokens:
            raise RequestError(f"min_tokens {params.min_tokens} > max_tokens {params.max_tokens}")
        if len(ids) + 1 > self.max_model_len:
            raise RequestError(
                f"{len(ids)} prompt tokens + 1 > max_model_len {self.max_model_len}",
                code="prompt_too_long",
            )

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns an output for each request with news; [] when nothing is left."""
        outputs, self._undelivered = self._undelivered, []
        flight = self.launch()
        return outputs if flight is None else outputs + self.collect(flight)

    def launch(self) -> StepInFlight | None:
        """Schedule the next step and start it. `collect` must follow; None when nothing is left."""
        runner = self._open_runner()
        if not self._scheduler.has_unfinished:
            return None
        batch = self._scheduler.schedule()
        if self._scheduler.bound_by is not None:
            self._bound_steps[self._scheduler.bound_by] += 1
        for sequence in batch.sequences:
            self._answers[sequence.request.request_id].mark_started()
        try:
            output = runner.run(batch)
            sampled = self._sample(output.logits, batch)
        except Exception as error:
            return StepInFlight(batch, (), failure=error)
        except BaseException:
            self._scheduler.roll_back(batch, suspect=False)
            raise
        return StepInFlight(batch, sampled, output.scored)

    def collect(self, flight: StepInFlight) -> list[RequestOutput]:
        """Commit a step that was launched, and report what is new.

        A step that failed changes nothing; a request that fails by itself ends with an error.
        """
        if flight.failure is not None:
            return self._collect_failure(flight.batch, flight.failure)
        token_ids = [None if one is None else one.token_id for one in flight.sampled]
        self._scheduler.commit(flight.batch, token_ids)
        news: dict[str, Answer] = {}
        scored = iter(flight.scored)
        for sequence, one in zip(flight.batch.sequences, flight.sampled, strict=True):
            request = sequence.request
            scores = list(islice(scored, len(sequence.scored)))
            if request.status == "finished":
                continue
            answer = self._answers[request.request_id]
            news[request.request_id] = answer
            end = min(sequence.start + sequence.length, len(request.prompt_ids))
            self._prompt_tokens_computed += max(0, end - sequence.start)
            if not self._take_scores(answer, request, scores):
                continue
            if one is not None:
                self._take_token(answer, request, one)
        return [self._report(answer) for answer in news.values()]

    def cached_prefix(self, prompt: Prompt) -> CacheUse:
        """What the prefix cache has for a prompt now. Changes nothing.

        Raises:
            RequestError: the prompt cannot be read.
        """
        ids, is_chat = read_prompt(prompt, self.tokenizer)
        answer_at = self.tokenizer.answer_start(ids) if is_chat else None
        params = ResolvedSampling(seed=0)
        return self._cache.match(Request("", tuple(ids), params, 0, answer_at=answer_at)).use

    def clear_cache(self) -> None:
        """Forget all cached prefixes. What running requests hold they keep until they end."""
        self._cache.clear()

    def cache_report(self) -> CacheReport:
        """What the prefix cache holds at this moment, and what it was good for."""
        return cache_report(self._cache, self.stats())

    def allocated_bytes(self) -> dict[str, int]:
        """Bytes of weights and pools as they are allocated, by the names of the memory plan's rows.

        Raises:
            EngineError: the LLM is closed.
        """
        return self._open_runner().allocated_bytes()

    def stats(self) -> EngineStats:
        """Counters and gauges of this moment."""
        cache, blocks, states = self._cache, self._cache.blocks, self._cache.states
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            kv_blocks_used=blocks.num_used,
            kv_blocks_total=blocks.num_blocks,
            kv_blocks_peak=blocks.peak_used,
            state_slots_used=states.num_used,
            state_slots_total=states.num_slots,
            state_slots_peak=states.peak_used,
            num_preemptions=self._scheduler.num_preemptions,
            num_steps=self._scheduler.num_steps,
            prompt_tokens_computed=self._prompt_tokens_computed,
            output_tokens=self._output_tokens,
            prompt_tokens=cache.prompt_tokens,
            cached_tokens=cache.cached_tokens,
            kv_matched_tokens=cache.kv_matched_tokens,
            restored_tokens=cache.restored_tokens,
            blocks_cached=blocks.num_cached,
            blocks_evicted=cache.num_evicted_blocks,
            snapshots_used=states.num_stored,
            snapshots_total=states.num_snapshots,
            snapshots_peak=states.peak_snapshots,
            snapshots_evicted=states.num_evicted,
            misses=dict(cache.misses),
            bound_by=self._scheduler.bound_by if self._scheduler.has_unfinished else None,
            bound_steps=dict(self._bound_steps),
        )

    def check_integrity(self) -> None:
        """Prove that every block and slot has the owners that it should have. For tests."""
        self._scheduler.check_integrity()
        live = {request.request_id for request in self._scheduler.live_requests()}
        assert live == set(self._answers), "answers disagree with the scheduler"

    def close(self) -> None:
        """Give up the model's memory. Unfinished requests are dropped. May be called again."""
        self._runner = None
        self._answers.clear()
        self._undelivered.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open_runner(self) -> ModelRunner:
        if self._runner is None:
            raise EngineError("this LLM is closed")
        return self._runner

    def _step_for(self, wanted: set[str]) -> list[RequestOutput]:
        """One step; what it says of other requests is kept for the next `step`."""
        flight = self.launch()
        outputs = [] if flight is None else self.collect(flight)
        self._undelivered += [out for out in outputs if out.request_id not in wanted]
        return [out for out in outputs if out.request_id in wanted]

    def _sample(self, logits: torch.Tensor, batch: ScheduledBatch) -> tuple[Sampled | None, ...]:
        sampling = [sequence.request for sequence in batch.sequences if sequence.samples]
        rows = [
            SamplingRow(
                params=request.params,
                index=request.index,
                position=request.num_tokens,
                prompt_ids=request.prompt_ids,
                output_ids=request.output_ids,
                forbidden_ids=self._answers[request.request_id].forbidden_ids(request),
            )
            for request in sampling
        ]
        results = iter(sample(logits, rows))
        return tuple(next(results) if sequence.samples else None for sequence in batch.sequences)

    def _take_scores(
        self, answer: Answer, request: Request, scores: Sequence[PositionLogprobs | None]
    ) -> bool:
        """Keep the logprobs of prompt tokens; False where some are dead and the request has ended."""
        for score in scores:
            if score is None:
                self._end_dead(answer, request, len(request.prompt_logprobs) + 1)
                return False
            request.prompt_logprobs.append(score)
        return True

    def _end_dead(self, answer: Answer, request: Request, position: int) -> None:
        error = EngineError(
            "the model gave dead logits: not finite, or all equal",
            why=f"at position {position} of {request.request_id}",
            code="non_finite_logits",
        )
        for other in answer.requests:
            self._cache.forget(other)
        self._fail(answer, error)

    def _take_token(self, answer: Answer, request: Request, one: Sampled) -> None:
        if one.token_id is None:
            self._end_dead(answer, request, request.num_tokens)
            return
        self._output_tokens += 1
        if answer.add_token(request, one.token_id, one.logprobs) is not None:
            self._scheduler.finish(request)

    def _fail(self, answer: Answer, error: EngineError) -> None:
        for request in answer.requests:
            self._scheduler.finish(request)
        answer.end_all(FinishReason.ERROR, error)

    def _collect_failure(self, batch: ScheduledBatch, failure: Exception) -> list[RequestOutput]:
        if len(batch.sequences) > 1:
            logger.warning(
                "a step of %d sequences failed (%s); they run one at a time to find the one to blame",
                len(batch.sequences),
                failure,
            )
        outputs = []
        for request in self._scheduler.roll_back(batch):
            answer = self._answers.get(request.request_id)
            if answer is None:
                continue
            error = EngineError(
                f"the engine failed on this request: {type(failure).__name__}: {failure}"
            )
            error.__cause__ = failure
            self._fail(answer, error)
            outputs.append(self._report(answer))
        return outputs

    def _report(self, answer: Answer) -> RequestOutput:
        if answer.finished:
            self._answers.pop(answer.request_id, None)
        return answer.snapshot()


def _is_batch(prompts: object) -> bool:
    if not isinstance(prompts, list | tuple):
        return False
    return not prompts or not isinstance(prompts[0], int)


def _refused(request_id: str, error: RequestError) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        prompt_token_ids=[],
        outputs=[],
        usage=Usage(prompt_tokens=0),
        timing=Timing(),
        params=None,
        finished=True,
        error=error,
    )
