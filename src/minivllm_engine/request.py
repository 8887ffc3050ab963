"""A request as the user writes it (SamplingParams), as the engine runs it (Request), as it is answered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

from minivllm_engine.config import Integer, Number, SamplingOptions, Strings, message
from minivllm_engine.errors import EngineError, RequestError

MAX_LOGPROBS = 100


class FinishReason(StrEnum):
    """Why an output ended. `LENGTH` is its own max_tokens, `CONTEXT` the model's max_model_len."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"
    ABORT = "abort"
    ERROR = "error"


def _id_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list | set | frozenset) else value


def _seed(value: int) -> int:
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"not between -2^63 and 2^64 - 1 ({2**64 - 1})")
    return value


def _bias_keys(value: object) -> object:
    # JSON has no integer keys.
    if isinstance(value, Mapping):
        return {int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in value.items()}
    return value


class SamplingParams(BaseModel):
    """How one request is sampled. None takes the engine's, then the model's, then the built-in default.

    Attributes:
        temperature: 0 is exact argmax; otherwise logits are divided by it. Default 1.0.
        top_p: smallest set of tokens whose probabilities reach it; 0 keeps the likeliest token only.
        top_k: the k likeliest tokens; -1, 0 or the vocabulary's size and more keep all.
        min_p: drops tokens less likely than min_p times the likeliest.
        repetition_penalty: divides positive and multiplies negative logits of tokens that occur in the
            prompt or the output (CTRL, arXiv 1909.05858).
        presence_penalty, frequency_penalty: subtracted once, or once an occurrence, for tokens of the output.
        logit_bias: token id -> value added to its logit.
        max_tokens: most tokens to generate. Default 2048. The context may end first.
        min_tokens: end ids are impossible, and stop strings not looked for, before this many tokens.
        seed: of the request's own random stream; default the engine's `sampling.seed` + its number.
        n: how many independent outputs.
        stop: strings that end an output and are not part of it. They are looked for in the answer, not in
            reasoning, and never match a part of an added token such as `</think>`.
        stop_token_ids: further ids that end an output.
        ignore_eos: the model's own end ids do not end an output.
        prefix_cache: may the request start from what earlier ones left, and leave something itself?
        logprobs: report the logprobs of the sampled token and of that many likeliest (log-softmax of
            the model's logits, before any penalty or temperature).
        prompt_logprobs: the same for each token of the prompt but the first, given those before it. All
            of the prompt must be computed for that, so the request does without the prefix cache.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    temperature: Annotated[Number, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[Integer, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, allow_inf_nan=False)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[
        dict[int, Annotated[Number, Field(ge=-100, le=100)]], BeforeValidator(_bias_keys)
    ] = Field(default_factory=dict)
    max_tokens: Annotated[Integer, Field(ge=1)] | None = None
    min_tokens: Annotated[Integer, Field(ge=0)] | None = None
    seed: Annotated[Integer, AfterValidator(_seed)] | None = None
    n: Annotated[Integer, Field(ge=1, le=1024)] = 1
    stop: Strings | None = None
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_id_tuple)] = ()
    ignore_eos: bool | None = None
    logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prefix_cache: bool = True

    @classmethod
    def create(cls, **values: Any) -> "SamplingParams":
        """As the constructor, for names that are known only when it runs.

        Raises:
            RequestError: an unknown key, or a value of the wrong type or out of range.
        """
        return cls(**values)

    @model_validator(mode="wrap")
    @classmethod
    def _in_our_words(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(str(part) for part in first["loc"][:1])
            if first["type"] == "extra_forbidden":
                near = get_close_matches(path, cls.model_fields, n=1)
                what = f"{path}: no such sampling parameter"
                raise RequestError(what, hint=near[0] if near else None) from None
            raise RequestError(f"{path}: {message(first)}", why=f"got {first['input']!r}") from None

    def resolved(self, *layers: SamplingOptions, seed: int) -> "ResolvedSampling":
        """Every None replaced: by the first of `layers` that has a value, else by the built-in default."""
        values: dict[str, Any] = {"seed": seed}
        for name in type(self).model_fields:
            found = (getattr(source, name, None) for source in (self, *layers))
            value = next((value for value in found if value is not None), None)
            if value is not None and not (name == "seed" and self.seed is None):
                values[name] = value
        if self.prompt_logprobs is not None:
            values["prefix_cache"] = False
        return ResolvedSampling(**values)


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """SamplingParams with every choice made: the same fields, and the built-in defaults."""

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int = 2048
    min_tokens: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's logprob. `rank` 1 is the likeliest."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Logprobs at one position: the token that stands there, and the likeliest ones, best first."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...]


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
        """`token_ids` is what `ids` holds now. Only more may be added to it."""
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
    comes before the first token, and so its entry is None.
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
        reasons = [output.finish_reason for output in self.outputs]
        if not reasons or None in reasons:
            return None
        return FinishReason.ABORT if FinishReason.ABORT in reasons else reasons[0]


RequestStatus = Literal["waiting", "running", "finished"]


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in the scheduler: one output of what the user asked for.

    Owned by the scheduler: `status`, `output_ids`, the numbers of tokens and `num_preemptions`. The
    block table's ids belong to the block manager and the slot to the state manager; both are held by
    the request for as long as it runs. The prefix cache keeps what it knows of the request here too.

    Attributes:
        num_computed_tokens: whose state and KV are there.
        num_launched_tokens: those, and those of steps in flight.
        num_awaited: tokens that steps in flight will yield.
        last_turn: how many parts of steps had been launched with its latest one.
        answer_at: in a chat, where the prompt opens the answer: the last tokens of the prompt.
        block_hashes: of its blocks, as far as they were needed.
        num_kept_blocks: blocks of the table that are in the cache.
        boundaries: where snapshots are wanted, ascending.
        goes_on: its prompt begins with all that was computed of an earlier request, answer included.
        rolling_snapshot: the cache's node with the latest snapshot of the answer.
        cache_use: what it found when it first started; None before.
        prompt_logprobs: of the prompt's second token and those after it, as far as they are scored.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: ResolvedSampling
    arrival: int
    index: int = 0
    max_total_tokens: int = 0
    output_ids: list[int] = field(default_factory=list)
    status: RequestStatus = "waiting"
    block_table: list[int] = field(default_factory=list)
    slot: int | None = None
    num_computed_tokens: int = 0
    num_launched_tokens: int = 0
    num_awaited: int = 0
    num_preemptions: int = 0
    last_turn: int = 0
    answer_at: int | None = None
    block_hashes: list[bytes] = field(default_factory=list)
    num_kept_blocks: int = 0
    boundaries: list[int] = field(default_factory=list)
    goes_on: bool = False
    rolling_snapshot: Any = None
    cache_use: CacheUse | None = None
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: the prompt and what was sampled."""
        return len(self.prompt_ids) + len(self.output_ids)

    def token_at(self, position: int) -> int:
        """The id at a position of prompt and output together."""
        length = len(self.prompt_ids)
        return (
            self.prompt_ids[position] if position < length else self.output_ids[position - length]
        )

    def token_ids(self, start: int, end: int) -> list[int]:
        """Ids of the positions `start` to `end` of prompt and output together."""
        prompt_len = len(self.prompt_ids)
        ids = list(self.prompt_ids[start:end])
        if end > prompt_len:
            ids += self.output_ids[max(start - prompt_len, 0) : end - prompt_len]
        return ids
