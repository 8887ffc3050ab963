"""Two runs of one request, token by token: are they the same answer?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from minivllm_engine.core.outputs import CompletionOutput, PositionLogprobs
from minivllm_engine.core.sampling_params import ResolvedSampling
from minivllm_engine.protocol.shapes import finite

Verdict = Literal["equal", "tie", "different"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What rounding may do.

    Attributes:
        gap: most by which a logprob may differ.
        tie: candidates that lie closer together may change places.
    """

    gap: float
    tie: float


# Matrix products over other numbers of rows differ in the last bits of their type.
_TOLERANCES: Mapping[str, Tolerance] = {
    "fp32": Tolerance(2e-4, 1e-4),
    "fp16": Tolerance(0.06, 0.06),
    "bf16": Tolerance(0.5, 0.5),
}


def tolerance_of(dtype: str, state_dtype: str) -> Tolerance:
    """That of the coarser of the two."""
    return max((_TOLERANCES[name] for name in (dtype, state_dtype)), key=lambda t: t.gap)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two outputs beside each other.

    Attributes:
        gap: largest difference of a logprob, as far as both have seen the same tokens.
        position: of the first token that differs; None where all are the same.
        warm, cold: the tokens there; None where one of them had ended.
    """

    verdict: Verdict
    gap: float
    position: int | None = None
    warm: int | None = None
    cold: int | None = None


def compare(
    warm: CompletionOutput, cold: CompletionOutput, params: ResolvedSampling, tolerance: Tolerance
) -> Comparison:
    """Compare an output with the same computed from nothing. Both have logprobs."""
    warm_steps, cold_steps = warm.logprobs or [], cold.logprobs or []
    gap = 0.0
    for position, (w, c) in enumerate(zip(warm_steps, cold_steps, strict=False)):
        gap = max(gap, _gap(w, c))
        if w.sampled.token_id != c.sampled.token_id:
            tie = gap <= tolerance.gap and _is_tie(w, c, gap, params, tolerance.tie)
            verdict: Verdict = "tie" if tie else "different"
            return Comparison(verdict, gap, position, w.sampled.token_id, c.sampled.token_id)
    shorter = min(len(warm.token_ids), len(cold.token_ids))
    if len(warm.token_ids) != len(cold.token_ids):
        more = [ids[shorter] if len(ids) > shorter else None for ids in _ids(warm, cold)]
        return Comparison("different", gap, shorter, *more)
    return Comparison("equal" if gap <= tolerance.gap else "different", gap)


def _ids(*outputs: CompletionOutput) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def _gap(warm: PositionLogprobs, cold: PositionLogprobs) -> float:
    return max(_one_sided(warm, cold), _one_sided(cold, warm))


def _one_sided(mine: PositionLogprobs, theirs: PositionLogprobs) -> float:
    # A token that the other does not report is there at most as likely as the last that is.
    known, others = _by_id(mine), _by_id(theirs)
    floor = min((finite(t.logprob) for t in theirs.top), default=0.0)
    gaps = [abs(v - others[i]) if i in others else v - floor for i, v in known.items()]
    return max(0.0, *gaps)


def _by_id(position: PositionLogprobs) -> dict[int, float]:
    return {t.token_id: finite(t.logprob) for t in (position.sampled, *position.top)}


def _is_tie(
    warm: PositionLogprobs,
    cold: PositionLogprobs,
    gap: float,
    params: ResolvedSampling,
    tie: float,
) -> bool:
    """Do rounding errors explain that another token was taken?"""
    if params.temperature == 0 and not _adjusts(params):
        other = _by_id(cold).get(warm.sampled.token_id)
        return other is not None and abs(finite(cold.sampled.logprob) - other) < tie
    # A draw is a function of seed, position and logits: where these are the same, it fell on the edge
    # between two tokens. Without penalties those are neighbours in rank.
    neighbours = abs(warm.sampled.rank - cold.sampled.rank) <= 1
    return gap < tie and (_adjusts(params) or neighbours)


def _adjusts(params: ResolvedSampling) -> bool:
    penalised = params.presence_penalty or params.frequency_penalty
    return bool(
        params.repetition_penalty != 1 or penalised or params.logit_bias or params.min_tokens
    )
