"""`--verify N`: requests that reused a prefix are answered again from nothing, and compared."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minivllm_cli.batch.comparison import Comparison, compare, tolerance_of
from minivllm_cli.batch.prompts import BuiltPrompt
from minivllm_cli.console.streams import Console
from minivllm_cli.errors import Problem
from minivllm_engine.core.outputs import CompletionOutput, RequestOutput
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.core.units import count_text
from minivllm_engine.protocol.lines import Job

if TYPE_CHECKING:
    from minivllm_engine.llm import LLM

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
        return sum(len(replay.warm.outputs) for replay in self._replays.values())

    def asking(self, params: SamplingParams) -> SamplingParams:
        """The same request with the logprobs that a comparison needs."""
        count = max(params.logprobs or 0, _TOP)
        return params.model_copy(update={"logprobs": count})

    def as_asked(self, output: RequestOutput, params: SamplingParams) -> RequestOutput:
        """An output without the logprobs that only the comparison needed."""
        outputs = [_without_more(one, params.logprobs) for one in output.outputs]
        return replace(output, outputs=outputs)

    def consider(
        self, job: Job, prompt: BuiltPrompt, params: SamplingParams, output: RequestOutput
    ) -> None:
        """A request is done: replay it if it is one of those."""
        if self._stopped or output.error is not None or not output.usage.cached_tokens:
            return
        self.counts.reused += 1
        if self.counts.reused % self._every:
            return
        cold = self.asking(params).model_copy(update={"prefix_cache": False})
        request_id = self._llm.add_request(
            prompt.for_engine(), cold, request_id=f"replay-{output.request_id}", counted=False
        )
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
        """The run ends early: drop the replays, and begin no more."""
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
        if found.position is None:
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
    """The counts as they stand in `--summary`."""
    return {
        "reused": counts.reused,
        "replayed": counts.replayed,
        "equal": counts.equal,
        "ties": counts.ties,
        "different": counts.different,
        "largest_gap": counts.largest_gap,
    }


def verify_text(counts: VerifyCounts) -> str:
    """The counts as a line of the summary."""
    if not counts.replayed:
        return f"nothing was replayed: {count_text(counts.reused, 'request')} reused a prefix"
    ties = f" · {counts.ties:,} tied" if counts.ties else ""
    return (
        f"{counts.replayed:,} of {counts.reused:,} that reused a prefix: {counts.equal:,} equal"
        f"{ties} · {counts.different:,} different · largest logit gap {counts.largest_gap:.1e}"
    )
