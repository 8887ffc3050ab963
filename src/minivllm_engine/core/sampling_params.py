"""How an answer is sampled: as the user writes it, and with every default filled in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

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

from minivllm_engine.core.config import Integer, Number, SamplingOptions, Strings, message
from minivllm_engine.core.errors import RequestError
from minivllm_engine.core.structured import Structured
from minivllm_engine.core.suggest import suggest

MAX_LOGPROBS = 100
_MOST_STOPS = 1024

# Names of sampling parameters in other tools, and what to use here. None is not supported.
OTHER_NAMES: Mapping[str, str | None] = {
    **dict.fromkeys(
        ("max_new_tokens", "max_output_tokens", "max_length", "n_predict", "num_predict"),
        "max_tokens",
    ),
    **dict.fromkeys(("min_new_tokens", "min_length"), "min_tokens"),
    **dict.fromkeys(("stop_sequences", "stop_strings", "stop_words"), "stop"),
    "eos_token_id": "stop_token_ids",
    "num_return_sequences": "n",
    "repeat_penalty": "repetition_penalty",
    "do_sample": "temperature",
    "random_seed": "seed",
    **dict.fromkeys(("suppress_tokens", "sequence_bias", "allowed_token_ids"), "logit_bias"),
    **dict.fromkeys(
        (
            *("bad_words", "bad_words_ids", "begin_suppress_tokens", "no_repeat_ngram_size"),
            *("num_beams", "best_of", "use_beam_search", "length_penalty", "early_stopping"),
            *("typical_p", "top_a", "top_h", "tfs_z", "mirostat", "mirostat_tau", "mirostat_eta"),
            *("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "repeat_last_n", "guidance_scale"),
            *("xtc_probability", "dry_multiplier", "logits_processors", "truncate_prompt_tokens"),
            *("skip_special_tokens", "include_stop_str_in_output"),
            *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
        ),
        None,
    ),
}


def _id_tuple(value: object) -> object:
    found = tuple(value) if isinstance(value, list | set | frozenset) else value
    return _few(found) if isinstance(found, tuple) else found


def _few(values: tuple[Any, ...]) -> tuple[Any, ...]:
    # Each token of the answer is looked up among them.
    if len(values) > _MOST_STOPS:
        raise ValueError(f"{len(values):,} are too many, at most {_MOST_STOPS:,} can be")
    return values


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
        top_p: smallest set of tokens whose probabilities reach it; 0 keeps the most likely token only.
        top_k: the k most likely tokens; -1, 0 or the vocabulary's size and more keep all.
        min_p: drops tokens less likely than min_p times the most likely.
        repetition_penalty: divides positive and multiplies negative logits of tokens that occur in the
            prompt or the output (CTRL, arXiv 1909.05858).
        presence_penalty, frequency_penalty: subtracted once, or once an occurrence, for tokens of the output.
        logit_bias: token id -> value added to its logit.
        max_tokens: most tokens to generate. Default 2048. The context may end first.
        min_tokens: end ids are impossible, and stop strings not looked for, before this many tokens.
        seed: of the request's own random stream, -2^63 to 2^64 - 1; else the engine's `sampling.seed` + its
            number.
        n: how many independent outputs.
        stop: strings that end an output and are not part of it. They are looked for in the answer, not in
            reasoning, and never match a part of an added token such as `</think>`.
        stop_token_ids: further ids that end an output.
        ignore_eos: the model's own end ids do not end an output.
        prefix_cache: may the request start from what earlier ones left, and leave something itself?
        logprobs: report the logprobs of the sampled token and of that many most likely (log-softmax of
            the model's logits, before any penalty or temperature).
        prompt_logprobs: the same for each token of the prompt but the first, given those before it. All
            of the prompt must be computed for that, so the request does without the prefix cache.
        structured: the form of the answer, `{kind: content}` with one of json_schema, json_object, regex,
            choice, grammar. It begins after the reasoning.
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
    stop: Annotated[Strings, AfterValidator(_few)] | None = None
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_id_tuple)] = ()
    ignore_eos: bool | None = None
    logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prefix_cache: bool = True
    structured: Annotated[Structured | None, BeforeValidator(Structured.read)] = None

    @classmethod
    def create(cls, **values: Any) -> "SamplingParams":
        """Make one as the constructor does, for names that are known only when it runs.

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
                near = OTHER_NAMES.get(path) or suggest(path, cls.model_fields)
                raise RequestError(f"{path}: no such sampling parameter", hint=near) from None
            raise RequestError(f"{path}: {message(first)}", why=f"got {first['input']!r}") from None

    def resolved(self, *layers: SamplingOptions, seed: int) -> "ResolvedSampling":
        """Replace every None: by the first of `layers` that has a value, else by the built-in default."""
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
    structured: Structured | None = None
