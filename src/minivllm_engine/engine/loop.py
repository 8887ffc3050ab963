"""The engine's loop: schedule, launch, sample, commit and report, one step after the other.

On a GPU the next step is launched before the one in flight is looked at. Its tokens stay on the device,
where the next step finds them, and the host learns of them one step late. What a step computes for a request
that has ended meanwhile is thrown away when it lands.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

from minivllm_engine.cache.prefix_cache import PrefixCache
from minivllm_engine.core.errors import EngineError
from minivllm_engine.core.outputs import (
    FinishReason,
    PositionLogprobs,
    RequestOutput,
    RowScore,
)
from minivllm_engine.core.request import Request
from minivllm_engine.engine.deferred_signals import DeferredSignals
from minivllm_engine.engine.output_processor import RequestState
from minivllm_engine.engine.score_state import ScoreState
from minivllm_engine.runner.logit_edits import SamplingRow
from minivllm_engine.runner.model_runner import ModelRunner
from minivllm_engine.runner.sampler import Sampled, SampleHandle
from minivllm_engine.runner.scoring import RowResult, ScoreHandle
from minivllm_engine.scheduling.scheduled_batch import ScheduledBatch
from minivllm_engine.scheduling.scheduler import Scheduler
from minivllm_engine.tensors.model_input import AwaitedTokens

logger = logging.getLogger(__name__)

AnyState = RequestState | ScoreState


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that was launched and not yet collected: what it draws, or why it failed."""

    batch: ScheduledBatch
    draw: SampleHandle | None = None
    scored: ScoreHandle | None = None
    failure: Exception | None = None

    def awaited(self) -> AwaitedTokens | None:
        """Return what the step after it may need of it."""
        if self.draw is None:
            return None
        sampling = [s.request for s in self.batch.sequences if s.samples]
        rows = {request: row for row, request in enumerate(sampling)}
        return AwaitedTokens(self.draw.token_ids, rows)


class EngineLoop:
    """Owns the requests that have not finished, and the steps in flight.

    Args:
        overlap: launch a step before the one before it is collected, where that is possible.

    Attributes:
        signals: held by whoever calls, but while the model computes.
        request_states: those that are not finished, by request id.
        bound_steps: how many steps were as small as they were for which reason.
    """

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, cache: PrefixCache, *, overlap: bool
    ) -> None:
        self.runner: ModelRunner | None = runner
        self.overlap = overlap
        self.signals = DeferredSignals()
        self.request_states: dict[str, AnyState] = {}
        self.prompt_tokens_computed = 0
        self.output_tokens = 0
        self.bound_steps: Counter[str] = Counter()
        self._scheduler, self._cache = scheduler, cache
        self._flight: StepInFlight | None = None

    @property
    def is_closed(self) -> bool:
        return self.runner is None

    def open_runner(self) -> ModelRunner:
        """Return the runner. Raises EngineError once the engine is closed."""
        if self.runner is None:
            raise EngineError("this LLM is closed")
        return self.runner

    def close(self) -> None:
        self.runner, self._flight = None, None
        self.request_states.clear()

    def add(self, state: AnyState) -> None:
        """Begin to answer a request."""
        self.request_states[state.request_id] = state
        for request in state.requests:
            self._scheduler.add(request)

    def abort(self, request_id: str) -> AnyState | None:
        """End a request with what it has. None if there is no such request (any more)."""
        state = self.request_states.pop(request_id, None)
        if state is None:
            return None
        for request in state.requests:
            self._scheduler.finish(request)
        state.end_all(FinishReason.ABORT)
        self._land_if_idle()
        return state

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Finish a step, with the next one under way. [] when nothing is left.

        To be called with `signals` held, as `add` and `abort` are.
        """
        flight = self._flight or self.launch()
        self._flight = None
        if flight is None:
            return []
        try:
            self._flight = self._launch_after(flight)
            outputs = self.collect(flight)
        except BaseException:
            self._scheduler.roll_back_all()
            self._flight = None
            raise
        self._land_if_idle()
        return outputs

    def launch(self) -> StepInFlight | None:
        """Schedule the next step and start it. `collect` must follow; None when nothing is left."""
        self.open_runner()
        if not self._scheduler.has_unfinished:
            return None
        try:
            return self._run(self._scheduler.schedule(), None)
        except BaseException:
            self._scheduler.roll_back_all()
            raise

    def _launch_after(self, flight: StepInFlight) -> StepInFlight | None:
        """Start the step after `flight`. None where that must be collected first."""
        if not self.overlap or flight.failure is not None:
            return None
        if any(s.samples and s.request.params.structured for s in flight.batch.sequences):
            return None  # the token on its way decides what may follow it
        batch = self._scheduler.schedule_ahead()
        return None if batch is None else self._run(batch, flight.awaited())

    def _run(self, batch: ScheduledBatch, awaited: AwaitedTokens | None) -> StepInFlight:
        if self._scheduler.bound_by is not None:
            self.bound_steps[self._scheduler.bound_by] += 1
        for sequence in batch.sequences:
            if sequence.start < len(sequence.request.prompt_ids):
                self.request_states[sequence.request.request_id].mark_started()
        logger.debug("step of %d sequences", len(batch.sequences))
        runner = self.open_runner()
        try:
            self.signals.release()
            output = runner.run(batch, awaited)
            self.signals.hold()
            draw = runner.draw(output, self._rows(batch))
        except Exception as error:
            return StepInFlight(batch, failure=error)
        finally:
            self.signals.hold()
        return StepInFlight(batch, draw, output.scored)

    def _rows(self, batch: ScheduledBatch) -> list[SamplingRow]:
        rows = []
        for sequence in batch.sequences:
            if sequence.samples:
                request = sequence.request
                position = sequence.start + sequence.length
                state = self.request_states[request.request_id]
                assert isinstance(state, RequestState)
                count = position - len(request.prompt_ids)
                rows.append(
                    SamplingRow(
                        params=request.params,
                        index=request.index,
                        position=position,
                        prompt_ids=request.prompt_ids,
                        output_ids=request.output_ids,
                        forbidden_ids=state.forbidden_ids(request, count),
                        allowed=state.guide_of(request),
                        slot=sequence.slot,
                        owner=request,
                    )
                )
        return rows

    def collect(self, flight: StepInFlight) -> list[RequestOutput]:
        """Commit the oldest step in flight, and report what is new.

        A step that failed changes nothing; a request that fails by itself ends with an error.
        """
        if flight.failure is not None:
            return self._collect_failure(flight.batch, flight.failure)
        assert flight.draw is not None
        try:
            self.signals.release()
            sampled = self._results(flight.batch, flight.draw)
            scored = iter(() if flight.scored is None else flight.scored.results())
        except Exception as error:  # what a GPU could not compute is told here
            return self._collect_failure(flight.batch, error)
        finally:
            self.signals.hold()
        token_ids = [None if one is None else one.token_id for one in sampled]
        self._scheduler.commit(flight.batch, token_ids)
        news: dict[str, AnyState] = {}
        for sequence, one in zip(flight.batch.sequences, sampled, strict=True):
            request = sequence.request
            scores = list(islice(scored, len(sequence.scored))) if sequence.scored else []
            if request.status == "finished":
                continue
            state = self.request_states[request.request_id]
            news[request.request_id] = state
            if sequence.start < len(request.prompt_ids):
                end = min(sequence.start + sequence.length, len(request.prompt_ids))
                self.prompt_tokens_computed += end - sequence.start
            if scores and not self._take_scores(state, request, sequence.scored, scores):
                continue
            if one is not None:
                assert isinstance(state, RequestState)
                self._take_token(state, request, one)
        return [self._report(state) for state in news.values()]

    @staticmethod
    def _results(batch: ScheduledBatch, draw: SampleHandle) -> list[Sampled | None]:
        """One entry a sequence; None where it does not sample."""
        results = iter(draw.results())
        return [next(results) if sequence.samples else None for sequence in batch.sequences]

    def _land_if_idle(self) -> None:
        """A step in flight that nobody waits for any more need not be waited for."""
        if self._flight is not None and not self.request_states:
            self._scheduler.commit(self._flight.batch, [None] * len(self._flight.batch.sequences))
            self._flight = None

    # -- requests ----------------------------------------------------------------------------------

    def _take_scores(
        self, state: AnyState, request: Request, positions: range, scores: Sequence[RowResult]
    ) -> bool:
        """Keep what the rows at `positions` tell; False where some are dead and the request has ended."""
        for position, score in zip(positions, scores, strict=True):
            if score is None:
                self._end_non_finite(state, request, position + 1)
                return False
        if isinstance(state, RequestState):
            request.prompt_logprobs += cast("Sequence[PositionLogprobs]", scores)
        elif state.add_rows(request, cast("Sequence[RowScore]", scores)):
            self._scheduler.finish(request)
        return True

    def _end_non_finite(self, state: AnyState, request: Request, position: int) -> None:
        error = EngineError(
            "the model gave non-finite logits, or all equal",
            why=f"at position {position} of {request.request_id}",
            code="non_finite_logits",
        )
        for other in state.requests:
            self._cache.forget(other)
        self._fail(state, error)

    def _take_token(self, state: RequestState, request: Request, one: Sampled) -> None:
        if one.token_id is None:
            self._end_non_finite(state, request, request.num_tokens)
            return
        self.output_tokens += 1
        try:
            reason = state.add_token(request, one.token_id, one.logprobs)
        except EngineError as error:
            self._fail(state, error)
            return
        if reason is not None:
            self._scheduler.finish(request)

    def _fail(self, state: AnyState, error: EngineError) -> None:
        for request in state.requests:
            self._scheduler.finish(request)
        state.end_all(FinishReason.ERROR, error)

    def _collect_failure(self, batch: ScheduledBatch, failure: Exception) -> list[RequestOutput]:
        self._flight = None  # it started from what the failed step was to leave
        if len(batch.sequences) > 1:
            logger.warning(
                "a step of %d sequences failed (%s); they run one at a time to find the one to blame",
                len(batch.sequences),
                failure,
            )
        outputs = []
        for request in self._scheduler.roll_back(batch):
            state = self.request_states.get(request.request_id)
            if state is None:
                continue
            error = EngineError(
                f"the engine failed on this request: {type(failure).__name__}: {failure}"
            )
            error.__cause__ = failure
            self._fail(state, error)
            outputs.append(self._report(state))
        return outputs

    def _report(self, state: AnyState) -> RequestOutput:
        if state.finished:
            self.request_states.pop(state.request_id, None)
        return state.snapshot()
