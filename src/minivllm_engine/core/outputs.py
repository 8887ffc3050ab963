"""What a request is answered with: outputs, tokens, times, and what the prefix cache did for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from minivllm_engine.core.errors import EngineError
from minivllm_engine.core.sampling_params import ResolvedSampling


class FinishReason(StrEnum):
    """Why an output ended. `LENGTH` is its own max_tokens, `CONTEXT` the model's max_model_len."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's logprob. `rank` 1 is the most likely."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Logprobs at one position: the token that stands there, and the most likely ones, best first."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...]


class RowScore(NamedTuple):
    """Logprobs of several ids at one position, in their order, and the most likely id of all."""

    logprobs: tuple[float, ...]
    best_id: int


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """How likely one continuation is, by the model's own logits.

    Attributes:
        index: its place among the continuations that were asked for.
        logprob: the sum of `logprobs`, without those that are None.
        logprobs: natural logarithms, one a token. None for a token that nothing comes before.
        token_ids: the tokens that were scored, which tell where the continuation begins.
        is_greedy: each token is the most likely one at its place; of equal ones that of the lowest id.
        num_bytes: of the continuation as text in UTF-8.
    """

    index: int
    logprob: float
    logprobs: tuple[float | None, ...]
    token_ids: tuple[int, ...]
    is_greedy: bool
    num_bytes: int


class _TokenIds:
    """A list of ids that is copied when it is first read. Hundreds of answers are reported a step, and
    copies would take the longer the longer they are."""

    def __get__(self, output: "CompletionOutput | None", owner: object = None) -> list[int]:
        if output is None:
            return ()  # type: ignore[return-value]  # where the dataclass asks for the default
        held: Sequence[int] | _IdsSoFar = vars(output)["token_ids"]
        if isinstance(held, list):
            return held
        ids = held.ids[: held.count] if isinstance(held, _IdsSoFar) else list(held)
        vars(output)["token_ids"] = ids
        return ids

    def __set__(self, output: "CompletionOutput", ids: Sequence[int]) -> None:
        vars(output)["token_ids"] = ids


@dataclass(frozen=True, slots=True)
class _IdsSoFar:
    """The first `count` of ids to which only more are added."""

    ids: list[int]
    count: int


@dataclass
class CompletionOutput:
    """One of a request's `n` outputs: everything so far, and what is new since the last step."""

    index: int
    text: str = ""
    text_delta: str = ""
    reasoning: str | None = None
    reasoning_delta: str = ""
    token_ids: list[int] = _TokenIds()  # type: ignore[assignment]
    reasoning_tokens: int = 0
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def set_ids_so_far(self, ids: list[int]) -> None:
        """Make `token_ids` what `ids` holds now. Only more may be added to it."""
        vars(self)["token_ids"] = _IdsSoFar(ids, len(ids))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "token_ids": self.token_ids}


MissReason = Literal[
    "new_prefix",
    "no_snapshot",
    "evicted",
    "below_granularity",
    "template_divergence",
    "disabled",
]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a chat's prompt stops being what an earlier turn had: the token there, and the one it has."""

    position: int
    cached_id: int
    prompt_id: int


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a request found in the prefix cache when it first started.

    Attributes:
        cached_tokens: tokens that need not be computed: KV and state were there.
        kv_matched: tokens whose KV was there, with a state to go on from or without.
        state_at: the position of the snapshot that was restored; 0 for none.
        miss_reason: why it was not more. None where nothing more could be reused.
        divergence: for `template_divergence`.
    """

    cached_tokens: int = 0
    kv_matched: int = 0
    state_at: int = 0
    miss_reason: MissReason | None = None
    divergence: Divergence | None = None


@dataclass(slots=True)
class Usage:
    """Tokens of a request, and what the prefix cache did for it (see `CacheUse`)."""

    prompt_tokens: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    kv_matched: int = 0
    state_at: int = 0
    miss_reason: MissReason | None = None
    divergence: Divergence | None = None
    scored_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. `queue_s` until the first step with the request, `ttft_s` until its first token,
    `tpot_s` a token after the first, `e2e_s` until its end; None where it did not come to that."""

    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A request's answer, so far or whole. `text`, `text_delta` and `reasoning` are those of output 0.

    `params` is None where the request was refused before anything of it was understood.
    `prompt_logprobs`, where asked for, has an entry a prompt token as far as it was computed; nothing
    comes before the first token, and so its entry is None. `scores` are those of `LLM.score`, as far as
    they are whole; None for an answer that is sampled. `scores_end` is why they ended.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage
    timing: Timing
    params: ResolvedSampling | None
    finished: bool = False
    error: EngineError | None = None
    num_prompt_computed: int = 0
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    scores: list[ContinuationScore] | None = None
    scores_end: FinishReason | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text if self.outputs else ""

    @property
    def text_delta(self) -> str:
        return self.outputs[0].text_delta if self.outputs else ""

    @property
    def reasoning(self) -> str | None:
        return self.outputs[0].reasoning if self.outputs else None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None while an output is still being written.

        `ABORT` and `ERROR` end a request as a whole, whatever some outputs had come to by then: those
        keep their own reasons. Where every output came to its own end, it is that of output 0.
        """
        if self.error is not None:
            return FinishReason.ERROR
        if self.scores is not None:
            return self.scores_end
        reasons = [output.finish_reason for output in self.outputs]
        if not reasons or None in reasons:
            return None
        return FinishReason.ABORT if FinishReason.ABORT in reasons else reasons[0]
