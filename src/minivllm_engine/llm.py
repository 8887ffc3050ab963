"""LLM: the engine's public face."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from minivllm_engine.cache.block_manager import BlockManager
from minivllm_engine.cache.deltanet_state import DeltaNetStateManager
from minivllm_engine.cache.prefix_cache import PrefixCache
from minivllm_engine.cache.report import CacheReport, cache_report
from minivllm_engine.core.config import EngineConfig
from minivllm_engine.core.errors import ConfigError, RequestError
from minivllm_engine.core.outputs import CacheUse, RequestOutput
from minivllm_engine.core.request import ReadyRequest, ReadyScore
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.core.stats import EngineStats, LoadReport
from minivllm_engine.core.structured import Structured
from minivllm_engine.engine.input_processor import InputProcessor, is_batch, refused
from minivllm_engine.engine.loop import EngineLoop
from minivllm_engine.engine.out_of_memory import give_back_unused, shortage_named
from minivllm_engine.engine.output_processor import RequestState
from minivllm_engine.engine.prepare import PreparedModel, prepare
from minivllm_engine.memory.layout import MemoryPlan
from minivllm_engine.runner.model_runner import ModelRunner, Progress
from minivllm_engine.scheduling.scheduler import Scheduler
from minivllm_engine.text.prompt import Prompt, is_messages


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
        with shortage_named(prepared):
            runner = ModelRunner(
                prepared.index,
                self.model_config,
                self._plan,
                options=self.config.engine,
                progress=progress,
            )
        self._input_processor = InputProcessor(prepared)
        self._cache = PrefixCache(
            BlockManager(self._plan.num_blocks, self._plan.block_size),
            DeltaNetStateManager(self._plan.max_num_seqs, self._plan.num_snapshots),
            model_id=f"{self.model_path} {self._plan.dtype} {self._plan.state_dtype}",
            enabled=self.config.cache.prefix_cache and self._plan.num_snapshots > 0,
            sparse_tokens=_sparse_tokens(self._plan),
        )
        self._scheduler = Scheduler(
            self._cache, max_num_batched_tokens=self._plan.max_num_batched_tokens
        )
        self._loop = EngineLoop(
            runner, self._scheduler, self._cache, overlap=self._plan.device.kind == "cuda"
        )
        self._undelivered: dict[str, list[RequestOutput]] = {}
        self._num_added = 0

    # -- requests --------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Longest sequence: prompt and output together."""
        return self._plan.max_model_len

    @property
    def has_unfinished(self) -> bool:
        return bool(self._loop.request_states or self._undelivered)

    @property
    def running_ids(self) -> frozenset[str]:
        """Ids of the requests of which a sequence is computed now; the others wait for room."""
        return frozenset(request.request_id for request in self._scheduler.running)

    def read_request(self, prompt: Prompt, params: SamplingParams | None = None) -> ReadyRequest:
        """Read a prompt and resolve its parameters, as `add_request` would now. Queues nothing.

        Raises:
            RequestError: one of them cannot be read.
        """
        return self._input_processor.read(prompt, params, self._num_added)

    def compile_form(self, ids: Sequence[int], form: Structured, *, chat: bool = False) -> None:
        """Compile a form before a request asks for it, which would hold up the others. From any thread.

        Args:
            ids: of the prompt, which says whether the model thinks before it answers.

        Raises:
            RequestError: it cannot be held to.
        """
        self._input_processor.matcher(ids, form, chat=chat)

    def add_request(
        self,
        prompt: Prompt | ReadyRequest,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        counted: bool = True,
    ) -> str:
        """Queue a request for `step`. Returns its id.

        Args:
            prompt: or a request that has been read, which brings its parameters.
            counted: the sums of `stats` and `cache_report` know of it.

        Raises:
            RequestError: it can never be served; code `empty_prompt`, `prompt_too_long`,
                `does_not_fit` or `invalid_field`.
        """
        return self._add(
            prompt, params, request_id=request_id, place=self._num_added, counted=counted
        )

    def read_score(self, item: Mapping[str, Any]) -> ReadyScore:
        """Read an item as `add_score` would. Queues nothing.

        Raises:
            RequestError: it cannot be read.
        """
        return self._input_processor.read_score(item)

    def add_score(
        self,
        item: Mapping[str, Any] | ReadyScore,
        *,
        request_id: str | None = None,
        counted: bool = True,
    ) -> str:
        """Queue an item of `score` for `step`, or one that has been read. Returns its id.

        Raises:
            RequestError: as `add_request`.
        """
        request_id = self._take_id(request_id)
        ready = item if isinstance(item, ReadyScore) else self.read_score(item)
        state = self._input_processor.admit_score(ready, request_id, counted=counted)
        with self._loop.signals:
            self._loop.add(state)
        return request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, with what it has. None where there is no such request (any more)."""
        with self._loop.signals:
            state = self._loop.abort(request_id)
            if state is None:
                return None
            self._undelivered.pop(request_id, None)
            return state.snapshot()

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
        many: list[Any] = list(prompts) if is_batch(prompts) else [prompts]
        each: list[Any] = list(params) if isinstance(params, list | tuple) else [params] * len(many)
        if len(each) != len(many):
            raise ConfigError(f"{len(many)} prompts but {len(each)} sampling params")

        def add(place: int, request_id: str) -> str:
            return self._add(many[place], each[place], request_id=request_id, place=place)

        return self._answer_all(len(many), add)

    def score(
        self, items: Mapping[str, Any] | Sequence[Mapping[str, Any] | ReadyScore]
    ) -> list[RequestOutput]:
        """Tell how likely given continuations are, by the model's own logits: no penalty, no temperature.

        Args:
            items: prompt mappings, one or a list of them, each with `continuations` (texts) or
                `continuation_token_ids`. With an empty prompt and without `prefix_token_id`, a token
                before it, nothing tells of the first token, whose logprob is None.

        Returns:
            Outputs in order, with `scores` and without `outputs`. A bad item gives one with `error` set.
        """
        many: list[Any] = list(items) if isinstance(items, list | tuple) else [items]
        return self._answer_all(
            len(many), lambda place, request_id: self.add_score(many[place], request_id=request_id)
        )

    def _answer_all(self, number: int, add: Callable[[int, str], object]) -> list[RequestOutput]:
        """Queue so many requests and run them to their end. `add` gets a place and an id."""
        results: dict[str, RequestOutput] = {}
        ids: list[str] = []
        try:
            for place in range(number):
                ids.append(self._free_id())
                try:
                    add(place, ids[-1])
                except RequestError as error:
                    results[ids[-1]] = refused(ids[-1], error)
            wanted = set(ids)
            while len(results) < len(ids):
                for out in self._news_of(wanted):
                    if out.finished:
                        results[out.request_id] = out
        finally:
            self._drop(ids)
        return [results[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of them. A bad one gives an output with `error` set.

        Args:
            template: what a prompt may have beside its messages: `tools`, `enable_thinking`,
                `continue_final_message`, `chat_template_kwargs`.
        """
        many = [messages] if is_messages(messages) or not messages else messages
        return self.generate([{"messages": one, **template} for one in many], params)

    def stream(
        self, prompt: Prompt | ReadyRequest, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Answer one prompt as it comes; the last output is finished. Closing the iterator aborts.

        Raises:
            RequestError: as `add_request`, at the first `next`.
        """
        request_id = self._add(prompt, params, request_id=None, place=self._num_added)
        try:
            finished = False
            while not finished and self._is_taken(request_id):
                for out in self._news_of({request_id}):
                    finished = out.finished
                    yield out
        finally:
            self._drop([request_id])

    def _add(
        self,
        prompt: Prompt | ReadyRequest,
        params: SamplingParams | None,
        *,
        request_id: str | None,
        place: int,
        counted: bool = True,
    ) -> str:
        request_id = self._take_id(request_id)
        if not isinstance(prompt, ReadyRequest):
            prompt = self._input_processor.read(prompt, params, place)
        elif params is not None:
            raise RequestError("params: a request that was read has its parameters already")
        state = self._input_processor.admit(prompt, request_id, counted=counted)
        with self._loop.signals:
            self._loop.add(state)
        return request_id

    def _take_id(self, request_id: str | None) -> str:
        """The id of a request that is about to be added: the one that is wanted, or a free one."""
        self._loop.open_runner()
        if request_id is None:
            request_id = self._free_id()
        elif self._is_taken(request_id):
            raise RequestError(
                f"request id {request_id!r} is in use",
                why="its last output has not been taken yet",
                hint="give another id, or none",
            )
        self._num_added += 1
        return request_id

    def _free_id(self) -> str:
        """An id that no request has, whatever ids callers have given."""
        ids = (f"request-{number}" for number in count(self._num_added))
        return next(request_id for request_id in ids if not self._is_taken(request_id))

    def _is_taken(self, request_id: str) -> bool:
        """Is there a request of this id, or an output of it that nobody has got?"""
        return request_id in self._loop.request_states or request_id in self._undelivered

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns an output for each request with news; [] when nothing is left.

        On a GPU the news are those of the step before, while the next one runs.
        """
        news: list[RequestOutput] = []
        try:
            with self._loop.signals:
                if not (self._loop.is_closed and self._undelivered):
                    news = self._loop.step()
        except BaseException:  # what is known must outlive a step that is interrupted at its end
            self._keep(news)
            raise
        return self._take_undelivered(list(self._undelivered)) + news

    def _news_of(self, wanted: Collection[str]) -> list[RequestOutput]:
        """What is new of some requests, after a step if need be. What is new of others is kept."""
        with self._loop.signals:
            known = self._take_undelivered([kept for kept in self._undelivered if kept in wanted])
            if not known:
                news = self._loop.step()
                known = [out for out in news if out.request_id in wanted]
                self._keep(out for out in news if out.request_id not in wanted)
            return known

    def _drop(self, request_ids: Iterable[str]) -> None:
        """What nobody waits for any more, whatever has become of it."""
        with self._loop.signals:
            for request_id in request_ids:
                self._loop.abort(request_id)
                self._undelivered.pop(request_id, None)

    def _keep(self, outputs: Iterable[RequestOutput]) -> None:
        """For whoever asks for what is new of these requests."""
        for out in outputs:
            self._undelivered.setdefault(out.request_id, []).append(out)

    def _take_undelivered(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        return [out for request_id in request_ids for out in self._undelivered.pop(request_id)]

    # -- the cache -------------------------------------------------------------------------------

    def cached_prefix(self, prompt: Prompt) -> CacheUse:
        """What the prefix cache has for a prompt now. Changes nothing.

        Raises:
            RequestError: the prompt cannot be read.
        """
        return self._cache.match(self._input_processor.probe(prompt)).use

    def clear_cache(self) -> None:
        """Forget all cached prefixes. What running requests hold they keep until they end."""
        with self._loop.signals:
            self._cache.clear()

    def cache_report(self) -> CacheReport:
        """What the prefix cache holds at this moment, and what it was good for."""
        return cache_report(self._cache, self.stats())

    def allocated_bytes(self) -> dict[str, int]:
        """Bytes of weights and pools as they are allocated, by the names of the memory plan's rows.

        Raises:
            EngineError: the LLM is closed.
        """
        return self._loop.open_runner().allocated_bytes()

    # -- the device ------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""
        return self._plan.device.kind

    @property
    def load_report(self) -> LoadReport:
        """What the start took."""
        return self._loop.open_runner().load_report

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Batch sizes of decode steps that have a CUDA graph; () where there are none."""
        return self.load_report.graph_sizes

    def use_graphs(self, enabled: bool) -> None:
        """Run decode steps by CUDA graph, or not. The answers are the same.

        Raises:
            ConfigError: there are none.
        """
        if enabled and not self.graph_sizes:
            raise ConfigError(
                "there are no CUDA graphs",
                why=f"device {self.device}, graph.enabled {self.config.graph.enabled}",
            )
        decodes = self._loop.open_runner().graphs
        if decodes is not None:
            decodes.enabled = enabled

    # -- looking ---------------------------------------------------------------------------------

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
            prompt_tokens_computed=self._loop.prompt_tokens_computed,
            output_tokens=self._loop.output_tokens,
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
            bound_steps=dict(self._loop.bound_steps),
        )

    def check_integrity(self) -> None:
        """Prove that every block and slot has the owners that it should have. For tests."""
        self._scheduler.check_integrity()
        live = {request.request_id for request in self._scheduler.live_requests()}
        assert live == set(self._loop.request_states), "request states disagree with the scheduler"
        for state in self._loop.request_states.values():
            if isinstance(state, RequestState):
                state.check_guides()

    def close(self) -> None:
        """Free the model's memory. What is unfinished ends with a last output (abort). May be repeated."""
        with self._loop.signals:
            for request_id in list(self._loop.request_states):
                state = self._loop.abort(request_id)
                if state is not None:
                    self._keep([state.snapshot()])
            self._loop.close()
        give_back_unused(self._plan.device.kind)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _sparse_tokens(plan: MemoryPlan) -> int:
    """How close together snapshots may lie along a long prompt: see `PrefixCache`."""
    # On a GPU a step takes some 20 ms however short it is, so prompts are only cut where they are anyway.
    return max(1024, plan.max_num_batched_tokens) if plan.device.kind == "cuda" else 1024
