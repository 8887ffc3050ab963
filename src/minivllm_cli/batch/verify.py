"""`--verify N`: requests that reused a prefix are answered again from nothing, and compared."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from minivllm_cli.console.streams import Console
from minivllm_cli.errors import Problem
from minivllm_engine.core.outputs import (
    CompletionOutput,
    ContinuationScore,
    PositionLogprobs,
    RequestOutput,
)
from minivllm_engine.core.request import ReadyRequest, ReadyScore
from minivllm_engine.core.sampling_params import ResolvedSampling
from minivllm_engine.core.units import count_text
from minivllm_engine.protocol.lines import Job
from minivllm_engine.protocol.shapes import finite

if TYPE_CHECKING:
    from minivllm_engine.llm import LLM

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
    """Return the tolerance of the coarser of the two."""
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
    ids = (warm.token_ids, cold.token_ids)
    if len(ids[0]) != len(ids[1]):
        end = min(map(len, ids))
        return Comparison("different", gap, end, *(i[end] if len(i) > end else None for i in ids))
    return Comparison("equal" if gap <= tolerance.gap else "different", gap)


def compare_scores(
    warm: ContinuationScore, cold: ContinuationScore, tolerance: Tolerance
) -> Comparison:
    """Compare the logprobs of a continuation with the same computed from nothing."""
    pairs = zip(warm.logprobs, cold.logprobs, strict=True)
    gap = max((abs(w - c) for w, c in pairs if w is not None and c is not None), default=0.0)
    return Comparison("equal" if gap <= tolerance.gap else "different", gap)


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
    biased = params.logit_bias or params.min_tokens or params.structured is not None
    return bool(params.repetition_penalty != 1 or penalised or biased)


# Candidates beside the sampled token that are compared.
_TOP = 4
_MOST_SHOWN = 20


@dataclass
class VerifyCounts:
    """What came of the replays.

    Attributes:
        reused: requests that reused a prefix.
        replayed: of those, requests whose replay has come to its end.
        largest_gap: between logprobs of two runs, before they part.
    """

    reused: int = 0
    replayed: int = 0
    equal: int = 0
    ties: int = 0
    different: int = 0
    largest_gap: float = 0.0


@dataclass(frozen=True, slots=True)
class _Replay:
    job: Job
    warm: RequestOutput


class Verifier:
    """Asks the engine for what the comparison needs, replays, compares and reports.

    A replay is the same request with its own seed, and without the prefix cache: it neither finds nor
    leaves anything there. It is no request of the run: no record and no total knows of it.

    Args:
        every: replay each Nth request that reused a prefix.
        counts: to go on from, where several engines or workloads are one run.
    """

    def __init__(
        self, llm: "LLM", every: int, console: Console, counts: VerifyCounts | None = None
    ) -> None:
        self.counts = counts or VerifyCounts()
        self._llm = llm
        self._every = every
        self._console = console
        engine = llm.config.engine
        self._tolerance = tolerance_of(engine.dtype, engine.state_dtype)
        self._replays: dict[str, _Replay] = {}
        self._stopped = False

    @property
    def num_sequences(self) -> int:
        """Sequences of replays that are on their way."""
        return sum(len(replay.warm.outputs) or 1 for replay in self._replays.values())

    def asking(self, request: ReadyRequest) -> ReadyRequest:
        """Return the same request with the logprobs that a comparison needs."""
        count = max(request.params.logprobs or 0, _TOP)
        return replace(request, params=replace(request.params, logprobs=count))

    def as_asked(self, output: RequestOutput, params: ResolvedSampling) -> RequestOutput:
        """Return an output without the logprobs that only the comparison needed."""
        outputs = [_without_more(one, params.logprobs) for one in output.outputs]
        return replace(output, outputs=outputs)

    def consider(self, job: Job, request: ReadyRequest | ReadyScore, output: RequestOutput) -> None:
        """Replay a request that is done, if it is one of those."""
        if self._stopped or output.error is not None or not output.usage.cached_tokens:
            return
        self.counts.reused += 1
        if self.counts.reused % self._every:
            return
        cold = replace(request, params=replace(request.params, prefix_cache=False))
        name = f"replay-{output.request_id}"
        if isinstance(cold, ReadyScore):
            request_id = self._llm.add_score(cold, request_id=name, counted=False)
        else:
            cold = self.asking(cold)
            request_id = self._llm.add_request(cold, request_id=name, counted=False)
        self._replays[request_id] = _Replay(job, output)

    def take(self, output: RequestOutput) -> bool:
        """Look at an output of the engine. False where it is not that of a replay."""
        replay = self._replays.get(output.request_id)
        if replay is None:
            return False
        if output.finished:
            del self._replays[output.request_id]
            self._compare(replay, output)
        return True

    def stop(self) -> None:
        """Drop the replays, and begin no more: the run ends early."""
        self._stopped = True
        for request_id in list(self._replays):
            self._llm.abort(request_id)
        self._replays.clear()

    def _compare(self, replay: _Replay, cold: RequestOutput) -> None:
        counts = self.counts
        counts.replayed += 1
        if cold.error is not None:
            counts.different += 1
            self._report(replay, "its cold replay failed", cold.error.what)
            return
        assert cold.params is not None
        if replay.warm.scores is not None and cold.scores is not None:
            pairs = zip(replay.warm.scores, cold.scores, strict=True)
            found = [compare_scores(w, c, self._tolerance) for w, c in pairs]
        else:
            found = [
                compare(w, c, cold.params, self._tolerance)
                for w, c in zip(replay.warm.outputs, cold.outputs, strict=True)
            ]
        counts.largest_gap = max(counts.largest_gap, *(one.gap for one in found))
        verdicts = {one.verdict for one in found}
        if "different" in verdicts:
            counts.different += 1
        elif "tie" in verdicts:
            counts.ties += 1
        else:
            counts.equal += 1
        for index, one in enumerate(found):
            self._say(replay, index, one)

    def _say(self, replay: _Replay, index: int, found: Comparison) -> None:
        if found.verdict == "equal":
            return
        place = f"output {index}" if len(replay.warm.outputs) > 1 else "the answer"
        if replay.warm.scores:
            what = f"continuation {index} has other logprobs than in its cold replay"
        elif found.position is None:
            what = f"{place} has the same tokens as its cold replay, from other logits"
        else:
            what = (
                f"{place} differs from its cold replay at token {found.position}: "
                f"{self._token(found.warm)} instead of {self._token(found.cold)}"
            )
        if found.verdict == "tie":
            self._console.note(
                f"verify: {_name(replay.job)}: {what}; a tie, within rounding ({found.gap:.1e})"
            )
            return
        usage = replay.warm.usage
        why = (
            f"largest logit gap {found.gap:.2g}, allowed {self._tolerance.gap:g}; "
            f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} prompt tokens were reused"
        )
        self._report(replay, what, why)

    def _report(self, replay: _Replay, what: str, why: str) -> None:
        if self.counts.different <= _MOST_SHOWN:
            self._console.error(Problem(f"verify: {_name(replay.job)}: {what}", why=why))

    def _token(self, token_id: int | None) -> str:
        if token_id is None:
            return "its end"
        return f"{self._llm.tokenizer.token_text(token_id)!r}"


def _name(job: Job) -> str:
    if job.line.number is None:
        return f"request {job.line.id}"
    return f"line {job.line.number} ({job.line.id})"


def _without_more(output: CompletionOutput, count: int | None) -> CompletionOutput:
    logprobs = output.logprobs
    if count is None or logprobs is None:
        return replace(output, logprobs=None)
    return replace(output, logprobs=[replace(p, top=p.top[:count]) for p in logprobs])


def verify_document(counts: VerifyCounts) -> dict[str, Any]:
    """Write the counts as they stand in `--summary`."""
    return asdict(counts)


def verify_text(counts: VerifyCounts) -> str:
    """Write the counts as a line of the summary."""
    if not counts.replayed:
        return f"nothing was replayed: {count_text(counts.reused, 'request')} reused a prefix"
    ties = f" · {counts.ties:,} tied" if counts.ties else ""
    return (
        f"{counts.replayed:,} of {counts.reused:,} that reused a prefix: {counts.equal:,} equal"
        f"{ties} · {counts.different:,} different · largest logit gap {counts.largest_gap:.1e}"
    )
