"""A fake engine for `bench`: it says that it runs on CUDA and has graphs, and takes time as it is told: that
of a clock of its own.

Its tokens are a function of the tokens before them, so that every way of getting to them gives the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from minivllm_cli import engine
from minivllm_cli.bench import document, sampling
from minivllm_cli.config.settings import Settings
from minivllm_engine.core.outputs import (
    CacheUse,
    CompletionOutput,
    PositionLogprobs,
    RequestOutput,
    Timing,
    TokenLogprob,
    Usage,
)
from minivllm_engine.core.request import ReadyRequest
from minivllm_engine.core.sampling_params import ResolvedSampling, SamplingParams
from minivllm_engine.core.stats import LoadReport
from minivllm_engine.engine.prepare import PreparedModel
from minivllm_engine.text.tokenizer import Tokenizer
from support.fake_llm import PrefixMemory

# The same in every run of this process, and slow.
_environment, _tokenizer = cache(document.environment), cache(Tokenizer.from_dir)


@dataclass
class Behaviour:
    """What the engine does beside its work.

    Attributes:
        device: "cuda" or "cpu"; the latter has no graphs.
        late: tokens come one `step` after they were made, as from an engine that works ahead; what was
            in flight when requests were aborted is collected by one more step.
        eager_s, graph_s: of a decode step; prompt_s: of one that reads a prompt, beside that.
        first_use_s: the first step of each batch size and way takes so much longer.
        budget: prompt tokens of a step.
        other_token: position of a token that graphs get wrong; None for none.
        one_short: answers end a token early.
        fails_at: this step (counted over all) raises.
        leaky: prefixes are kept over `clear_cache`.
        on_step: called in each step.
    """

    device: str = "cuda"
    late: bool = False
    eager_s: float = 0.0
    graph_s: float = 0.0
    prompt_s: float = 0.0
    first_use_s: float = 0.0
    budget: int = 10**9
    other_token: int | None = None
    one_short: bool = False
    fails_at: int | None = None
    leaky: bool = False
    on_step: Callable[[int], None] = lambda step: None


@dataclass
class Clock:
    """The time that `bench` reads; each look takes a microsecond."""

    now: float = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now


@dataclass
class _Running:
    request_id: str
    prompt: tuple[int, ...]
    params: ResolvedSampling
    use: CacheUse
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    computed: int = 0
    made: list[int] = field(default_factory=list)
    told: int = 0


class FakeBenchEngine:
    """The surface of `LLM` that `bench` uses.

    Attributes:
        log: what was asked of it: ("graphs", on), ("clear",), ("add", prompt, graphs on).
    """

    def __init__(self, prepared: PreparedModel, behaviour: Behaviour, clock: Clock) -> None:
        self.config = prepared.config
        self.model_config = prepared.model_config
        self.tokenizer = prepared.tokenizer
        self.max_model_len = prepared.plan.max_model_len
        self.device = behaviour.device
        enabled = self.device == "cuda" and prepared.config.graph.enabled is not False
        sizes = (1, 2, 4) if enabled else ()
        self.load_report = LoadReport(1.5, 0.0, 2.0 if sizes else 0.0, sizes, len(sizes) << 20, 0)
        self.graph_sizes = sizes
        self.log: list[tuple[Any, ...]] = []
        self.closed = False
        self._behaviour, self._clock = behaviour, clock
        self._graphs = bool(sizes)
        self._running: list[_Running] = []
        self._memory = PrefixMemory()
        self._steps = 0
        self._in_flight = False
        self._used: set[tuple[int, bool]] = set()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running)

    def use_graphs(self, enabled: bool) -> None:
        assert self.graph_sizes or not enabled
        self._graphs = enabled
        self.log.append(("graphs", enabled))

    def clear_cache(self) -> None:
        assert not self._running and not self._in_flight
        if not self._behaviour.leaky:
            self._memory = PrefixMemory()
        self.log.append(("clear",))

    def read_request(self, prompt: Any, params: SamplingParams | None) -> ReadyRequest:
        sampling = (params or SamplingParams()).resolved(seed=0)
        return ReadyRequest(tuple(prompt["prompt_token_ids"]), sampling)

    def add_request(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        counted: bool = True,
    ) -> str:
        request_id = request_id or f"request-{len(self.log)}"
        ready = prompt if isinstance(prompt, ReadyRequest) else self.read_request(prompt, params)
        ids, sampling = ready.prompt_ids, ready.params
        assert len(ids) + 1 <= self.max_model_len
        use = CacheUse(miss_reason="disabled")
        if sampling.prefix_cache:
            use = self._memory.find(ids)
            self._memory.keep(ids)
        assert request_id not in [one.request_id for one in self._running]
        self._running.append(_Running(request_id, ids, sampling, use, computed=use.cached_tokens))
        self.log.append(("add", ids, self._graphs, sampling.prefix_cache))
        return request_id

    def abort(self, request_id: str) -> None:
        self._running = [one for one in self._running if one.request_id != request_id]
        self._in_flight = self._behaviour.late

    def step(self) -> list[RequestOutput]:
        self._in_flight = False
        if not self._running:
            return []
        self._steps += 1
        self._behaviour.on_step(self._steps)
        if self._steps == self._behaviour.fails_at:
            raise RuntimeError("the fan fell off")
        self._take_time()
        outputs = []
        budget = self._behaviour.budget
        for one in list(self._running):
            before = len(one.made)
            if one.computed < len(one.prompt):
                part = min(budget, len(one.prompt) - one.computed)
                one.computed += part
                budget -= part
            if one.computed >= len(one.prompt) and before < self._length(one):
                self._make_token(one)
            told = before if self._behaviour.late else len(one.made)
            if told > one.told:
                one.told = told
                outputs.append(self._output(one, told))
                if outputs[-1].finished:
                    self._running.remove(one)
        return outputs

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(
            num_running=len(self._running), num_preemptions=0, num_steps=self._steps
        )

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> "FakeBenchEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_time(self) -> None:
        key = (len(self._running), self._graphs)
        first = key not in self._used
        self._used.add(key)
        behaviour = self._behaviour
        seconds = behaviour.graph_s if self._graphs else behaviour.eager_s
        reads = any(one.computed < len(one.prompt) for one in self._running)
        self._clock.now += seconds + first * behaviour.first_use_s + reads * behaviour.prompt_s

    def _length(self, one: _Running) -> int:
        return one.params.max_tokens - self._behaviour.one_short

    def _make_token(self, one: _Running) -> None:
        # What comes next depends on all tokens before it, whichever of them were the prompt.
        all_ids = (*one.prompt, *one.made)
        token = (sum(all_ids) * 31 + len(all_ids)) % self.model_config.vocab_size
        if self._graphs and len(one.made) == self._behaviour.other_token:
            token = (token + 1) % self.model_config.vocab_size
        one.made.append(token)
        if one.params.logprobs is not None:
            warm = 0.25 if self._behaviour.leaky and one.use.cached_tokens else 0.0
            top = TokenLogprob(token, -0.5 - warm, 1)
            one.logprobs.append(PositionLogprobs(top, (top,)))

    def _output(self, one: _Running, told: int) -> RequestOutput:
        use = one.use
        usage = Usage(len(one.prompt), told, 0, use.cached_tokens, use.kv_matched, use.state_at)
        logprobs = one.logprobs[:told] if one.params.logprobs is not None else None
        return RequestOutput(
            request_id=one.request_id,
            prompt_token_ids=list(one.prompt),
            outputs=[CompletionOutput(0, token_ids=one.made[:told], logprobs=logprobs)],
            usage=usage,
            timing=Timing(queue_s=0.001),
            params=one.params,
            finished=told >= self._length(one),
            error=None,
        )


@dataclass
class FakeMachine:
    """What `engine` gives in a test; `engines` are those that were opened."""

    behaviour: Behaviour = field(default_factory=Behaviour)
    engines: list[FakeBenchEngine] = field(default_factory=list)
    prepared: list[PreparedModel] = field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the door to the engine."""
        clock = Clock()
        patch.setattr(sampling, "time", clock)
        patch.setattr(document, "environment", _environment)
        patch.setattr(Tokenizer, "from_dir", _tokenizer)
        real = {name: getattr(engine, name) for name in ("prepare_model", "prepare_shape")}

        def prepare(settings: Settings) -> PreparedModel:
            return self._placed(real["prepare_model"](self._on_cpu(settings)), settings)

        def prepare_shape(shape: str, settings: Settings) -> PreparedModel:
            return self._placed(real["prepare_shape"](shape, self._on_cpu(settings)), settings)

        def open_engine(prepared: PreparedModel, progress: Any = None) -> FakeBenchEngine:
            self.engines.append(FakeBenchEngine(prepared, self.behaviour, clock))
            return self.engines[-1]

        patch.setattr(engine, "prepare_model", prepare)
        patch.setattr(engine, "prepare_shape", prepare_shape)
        patch.setattr(engine, "open_engine", open_engine)
        patch.setattr(engine, "read_bandwidth", lambda device: 4e9)
        patch.setattr(engine, "reset_peak_memory", lambda device: None)
        patch.setattr(engine, "peak_memory", lambda device: self._peak())
        patch.setattr(engine, "num_threads", lambda: 2)

    def _peak(self) -> int | None:
        return 5 << 20 if self.behaviour.device == "cuda" else None

    def _on_cpu(self, settings: Settings) -> Settings:
        return settings.with_value("engine.device", "cpu")

    def _placed(self, prepared: PreparedModel, settings: Settings) -> PreparedModel:
        engine = prepared.config.engine.model_copy(update={"device": self.behaviour.device})
        config = prepared.config.model_copy(update={"engine": engine})
        self.prepared.append(replace(prepared, config=config))
        return self.prepared[-1]
