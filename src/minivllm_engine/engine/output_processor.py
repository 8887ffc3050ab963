"""One user's request while it runs: its outputs' texts, times and, in the end, why each of them ended."""

import time
from dataclasses import dataclass, field

from minivllm_engine.core.errors import EngineError
from minivllm_engine.core.outputs import (
    CacheUse,
    CompletionOutput,
    FinishReason,
    PositionLogprobs,
    RequestOutput,
    Timing,
    Usage,
)
from minivllm_engine.core.request import Request
from minivllm_engine.structured.matcher import Guide, Matcher
from minivllm_engine.text.detokenizer import IncrementalDetokenizer, opens_reasoning
from minivllm_engine.text.tokenizer import Tokenizer

_NO_USE = CacheUse()


@dataclass(slots=True)
class _Output:
    """One of the request's outputs: the scheduler's request, and its text so far."""

    request: Request
    detokenizer: IncrementalDetokenizer
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    guide: Guide | None = None
    sent_text: int = 0
    sent_reasoning: int = 0


class RequestState:
    """Turns sampled tokens into a RequestOutput.

    Args:
        end_ids: ids that end an output; those of the model, unless the request ignores them.
        split_reasoning: the prompt is a chat, whose reasoning is told from the answer.
        matcher: of the form that the answer must have, at its start.
    """

    def __init__(
        self,
        request_id: str,
        requests: list[Request],
        tokenizer: Tokenizer,
        end_ids: frozenset[int],
        *,
        split_reasoning: bool,
        matcher: Matcher | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = requests[0].params
        self.error: EngineError | None = None
        self._prompt_ids = requests[0].prompt_ids
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._arrived = time.perf_counter()
        self._first_step: float | None = None
        self._first_token: float | None = None
        self._ended: float | None = None
        in_reasoning = split_reasoning and opens_reasoning(tokenizer, self._prompt_ids)
        self._timing: Timing | None = None
        self._prompt_list = list(self._prompt_ids)
        self._outputs = [
            _Output(
                request,
                IncrementalDetokenizer(
                    tokenizer,
                    self.params.stop,
                    split_reasoning=split_reasoning,
                    in_reasoning=in_reasoning,
                ),
                guide=None if matcher is None else Guide(matcher),
            )
            for request in requests
        ]
        self._num_open = len(requests)

    @property
    def requests(self) -> list[Request]:
        """Its requests that have not ended."""
        return [output.request for output in self._outputs if output.finish_reason is None]

    @property
    def finished(self) -> bool:
        return not self._num_open

    def guide_of(self, request: Request) -> Guide | None:
        """Return what says which tokens may come next; None where all may."""
        output = self._outputs[request.index]
        return None if output.detokenizer.in_reasoning else output.guide

    def forbidden_ids(self, request: Request, num_outputs: int) -> tuple[int, ...]:
        """Return the ids that would end an output of so many tokens too soon: before its `min_tokens`, or
        before the answer whose form was asked for has begun."""
        output = self._outputs[request.index]
        if output.guide is not None and output.detokenizer.in_reasoning:
            return tuple(self._end_ids)
        if num_outputs >= self.params.min_tokens:
            return ()
        return tuple(self._end_ids.union(self.params.stop_token_ids))

    def mark_started(self) -> None:
        """Note that a step with one of its requests has begun."""
        if self._first_step is None:
            self._first_step = time.perf_counter()
            self._timing = None

    def add_token(
        self, request: Request, token_id: int, logprobs: PositionLogprobs | None
    ) -> FinishReason | None:
        """Take the token that was just appended to `request`. Returns why the output ends, if it does.

        Raises:
            EngineError: the form of the answer cannot be held to.
        """
        output = self._outputs[request.index]
        if self._first_token is None:
            self._first_token = time.perf_counter()
            self._timing = None
        if logprobs is not None:
            output.logprobs.append(logprobs)
        reason = self._reason_to_end(output, token_id)
        if reason is not None:
            self._end(output, reason)
        return reason

    def check_guides(self) -> None:
        """Prove that each grammar stands where its output does. For tests."""
        for output in self._outputs:
            if output.guide is not None and output.finish_reason is None:
                ids = output.request.output_ids
                output.guide.check(ids[output.detokenizer.num_reasoning_tokens :])

    def end_all(self, reason: FinishReason, error: EngineError | None = None) -> None:
        """End every output that has not ended: an abort or an error."""
        self.error = error
        for output in self._outputs:
            if output.finish_reason is None:
                self._end(output, reason)

    def snapshot(self) -> RequestOutput:
        """Return all of the answer so far; its deltas are what came since the last snapshot."""
        outputs = [self._completion(output) for output in self._outputs]
        completion_tokens = reasoning_tokens = 0
        for output in self._outputs:
            completion_tokens += len(output.request.output_ids)
            reasoning_tokens += output.detokenizer.num_reasoning_tokens
        computed = len(self._prompt_ids)
        if not completion_tokens:
            computed = min(output.request.num_computed_tokens for output in self._outputs)
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self._prompt_list,
            outputs=outputs,
            usage=self._usage(completion_tokens, reasoning_tokens),
            timing=self._timing_of(completion_tokens),
            params=self.params,
            finished=self.finished,
            error=self.error,
            num_prompt_computed=computed,
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _prompt_logprobs(self) -> list[PositionLogprobs | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        return [None, *self._outputs[0].request.prompt_logprobs]

    def _usage(self, completion_tokens: int, reasoning_tokens: int) -> Usage:
        # Further outputs share the prompt with the first, which is the one that may have found it.
        use = self._outputs[0].request.cache_use or _NO_USE
        return Usage(
            prompt_tokens=len(self._prompt_ids),
            completion_tokens=completion_tokens,
            reasoning_tokens=reasoning_tokens,
            cached_tokens=use.cached_tokens,
            kv_matched=use.kv_matched,
            state_at=use.state_at,
            miss_reason=use.miss_reason,
            divergence=use.divergence,
        )

    def _reason_to_end(self, output: _Output, token_id: int) -> FinishReason | None:
        request, params = output.request, self.params
        early = len(request.output_ids) <= params.min_tokens
        if token_id in params.stop_token_ids and not early:
            output.stop_reason = token_id
            return FinishReason.STOP
        if token_id in self._end_ids and not early:
            output.stop_reason = self._tokenizer.token_text(token_id) or token_id
            return FinishReason.STOP
        guide = self.guide_of(request)
        stop = output.detokenizer.push(token_id, look_for_stops=not early)
        if stop is not None:
            output.stop_reason = stop
            return FinishReason.STOP
        if guide is not None:
            guide.consume(token_id)
            if guide.is_stopped:
                return FinishReason.STOP
        if len(request.output_ids) >= params.max_tokens:
            return FinishReason.LENGTH
        if request.num_tokens >= request.max_total_tokens:
            return FinishReason.CONTEXT
        return None

    def _end(self, output: _Output, reason: FinishReason) -> None:
        output.finish_reason = reason
        self._num_open -= 1
        # A model that was cut off may have been in the middle of a character; it did not write U+FFFD.
        ended_by_itself = reason not in (FinishReason.ABORT, FinishReason.ERROR)
        output.detokenizer.finish(keep_partial_character=ended_by_itself)
        self._ended = time.perf_counter()

    def _completion(self, output: _Output) -> CompletionOutput:
        text, reasoning = output.detokenizer.text, output.detokenizer.reasoning
        completion = CompletionOutput(
            index=output.request.index,
            text=text,
            text_delta=text[output.sent_text :],
            reasoning=reasoning,
            reasoning_delta=(reasoning or "")[output.sent_reasoning :],
            reasoning_tokens=output.detokenizer.num_reasoning_tokens,
            logprobs=None if self.params.logprobs is None else list(output.logprobs),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )
        completion.set_ids_so_far(output.request.output_ids)
        output.sent_text, output.sent_reasoning = len(text), len(reasoning or "")
        return completion

    def _timing_of(self, completion_tokens: int) -> Timing:
        preemptions = 0
        for output in self._outputs:
            preemptions += output.request.num_preemptions
        known = self._timing
        # Of hundreds of snapshots that a step takes nearly all say what those of the step before said.
        if known is None or self.finished or known.preemptions != preemptions:
            self._timing = known = self._measure(completion_tokens, preemptions)
        return known

    def _measure(self, completion_tokens: int, preemptions: int) -> Timing:
        def since_arrival(moment: float | None) -> float | None:
            return None if moment is None else moment - self._arrived

        ttft, e2e = since_arrival(self._first_token), since_arrival(self._ended)
        # With several outputs side by side a token's time is that of a step, so per output.
        later = completion_tokens / len(self._outputs) - 1
        tpot = None
        if ttft is not None and e2e is not None and self.finished and later > 0:
            tpot = (e2e - ttft) / later
        return Timing(
            queue_s=since_arrival(self._first_step),
            ttft_s=ttft,
            tpot_s=tpot,
            e2e_s=e2e if self.finished else None,
            preemptions=preemptions,
        )
