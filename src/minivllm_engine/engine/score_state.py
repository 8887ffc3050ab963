"""One user's request for scores while it runs: its continuations, times and, in the end, why it ended."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from minivllm_engine.core.errors import EngineError
from minivllm_engine.core.outputs import (
    CacheUse,
    ContinuationScore,
    FinishReason,
    RequestOutput,
    RowScore,
    Timing,
    Usage,
)
from minivllm_engine.core.request import Continuation, ReadyScore, Request

_NO_USE = CacheUse()


@dataclass(slots=True)
class _Group:
    """Continuations that one sequence tells about: they differ in their last token at most.

    Attributes:
        places: among the continuations that were asked for.
        last_ids: the distinct last tokens, in the order of their coming.
    """

    request: Request
    places: list[int]
    last_ids: list[int]
    whole: bool = False


class ScoreState:
    """Turns the scored rows of a request into a RequestOutput without outputs, but with scores.

    What comes before the last token of a continuation decides all its logprobs, so the four letters of a
    question are one sequence, without a token beyond the context.

    Args:
        first_arrival: that of its first sequence; the others follow.
    """

    def __init__(
        self, request_id: str, ready: ReadyScore, first_arrival: int, *, counted: bool
    ) -> None:
        self.request_id = request_id
        self.error: EngineError | None = None
        self._ready = ready
        self._scores: dict[int, ContinuationScore] = {}
        self._arrived = time.perf_counter()
        self._first_step: float | None = None
        self._ended: float | None = None
        self._end: FinishReason | None = None
        self._groups: list[_Group] = []
        for places in _alike(ready.continuations):
            number = len(self._groups)
            self._groups.append(
                _group(request_id, ready, places, number, first_arrival + number, counted)
            )

    @property
    def requests(self) -> list[Request]:
        """Its sequences that have not ended."""
        return [] if self._end else [group.request for group in self._groups if not group.whole]

    @property
    def finished(self) -> bool:
        return self._end is not None

    def mark_started(self) -> None:
        """Note that a step with one of its sequences has begun."""
        if self._first_step is None:
            self._first_step = time.perf_counter()

    def add_rows(self, request: Request, rows: Sequence[RowScore]) -> bool:
        """Take the scores of a sequence's next positions. Returns whether they were its last."""
        request.row_scores += rows
        if len(request.row_scores) < len(request.targets):
            return False
        group = self._groups[request.index]
        group.whole = True
        for place in group.places:
            self._scores[place] = _score_of(place, self._ready.continuations[place], group)
        if all(group.whole for group in self._groups):
            self._finish(FinishReason.STOP)
        return True

    def end_all(self, reason: FinishReason, error: EngineError | None = None) -> None:
        """End what has not ended: an abort or an error."""
        self.error = error
        if self._end is None:
            self._finish(reason)

    def _finish(self, reason: FinishReason) -> None:
        self._end, self._ended = reason, time.perf_counter()

    def snapshot(self) -> RequestOutput:
        """Return the scores that are whole by now."""
        first, prompt = self._groups[0].request, self._ready.prompt_ids
        use = first.cache_use or _NO_USE
        scores = [self._scores[place] for place in sorted(self._scores)]
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=list(prompt),
            outputs=[],
            usage=Usage(
                prompt_tokens=len(prompt),
                scored_tokens=sum(len(score.token_ids) for score in scores),
                cached_tokens=use.cached_tokens,
                kv_matched=use.kv_matched,
                state_at=use.state_at,
                miss_reason=use.miss_reason,
                divergence=use.divergence,
            ),
            timing=self._timing(),
            params=self._ready.params,
            finished=self.finished,
            error=self.error,
            num_prompt_computed=min(len(prompt), first.num_computed_tokens),
            scores=scores,
            scores_end=self._end,
        )

    def _timing(self) -> Timing:
        def since_arrival(moment: float | None) -> float | None:
            return None if moment is None else moment - self._arrived

        preemptions = sum(group.request.num_preemptions for group in self._groups)
        queue, e2e = since_arrival(self._first_step), since_arrival(self._ended)
        return Timing(queue_s=queue, e2e_s=e2e, preemptions=preemptions)


def count_sequences(ready: ReadyScore) -> int:
    """Return how many sequences must be computed for a request."""
    return len(_alike(ready.continuations))


def sequence_ids(one: Continuation) -> tuple[int, ...]:
    """Return the tokens that must be computed for a continuation: all but its last."""
    ids = one.context_ids + one.token_ids
    # Of a single token behind nothing there is nothing to tell; it is run all the same.
    return ids[:-1] or ids


def _alike(continuations: Sequence[Continuation]) -> list[list[int]]:
    """Places of continuations that one sequence tells about, by the first of them."""
    groups: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
    for place, one in enumerate(continuations):
        key = (len(one.context_ids), len(one.token_ids), sequence_ids(one))
        groups.setdefault(key, []).append(place)
    return list(groups.values())


def _group(
    request_id: str,
    ready: ReadyScore,
    places: list[int],
    number: int,
    arrival: int,
    counted: bool,
) -> _Group:
    members = [ready.continuations[place] for place in places]
    first, ids = members[0], sequence_ids(members[0])
    last_ids = list(dict.fromkeys(one.token_ids[-1] for one in members))
    inner = first.token_ids[:-1]
    targets = [*((token_id,) for token_id in inner), tuple(last_ids)]
    if not first.context_ids:  # nothing comes before the first token, and tells of it
        targets = targets[1:] or [()]
    request = Request(
        request_id,
        ids,
        ready.params,
        arrival,
        index=number,
        max_total_tokens=len(ids),
        counted=counted,
        targets=tuple(targets),
        reuse_end=len(first.context_ids),
    )
    return _Group(request, places, last_ids)


def _score_of(place: int, one: Continuation, group: _Group) -> ContinuationScore:
    ids, rows = one.token_ids, group.request.row_scores
    logprobs: list[float | None] = [] if one.context_ids else [None]
    greedy = True
    for token_id, row in zip(ids[len(logprobs) :], rows, strict=False):
        last = len(logprobs) == len(ids) - 1
        logprobs.append(row.logprobs[group.last_ids.index(token_id) if last else 0])
        greedy = greedy and row.best_id == token_id
    return ContinuationScore(
        index=place,
        logprob=math.fsum(value for value in logprobs if value is not None),
        logprobs=tuple(logprobs),
        token_ids=ids,
        is_greedy=greedy,
        num_bytes=one.num_bytes,
    )
