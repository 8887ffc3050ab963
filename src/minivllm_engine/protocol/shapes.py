"""Parts that answers in our shape and in OpenAI's have in common: logprobs and usage as JSON."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minivllm_engine.core.outputs import PositionLogprobs, TokenLogprob, Usage

if TYPE_CHECKING:
    from minivllm_engine.text.tokenizer import Tokenizer

_MINUS_INFINITY = -9999.0


def position_record(position: PositionLogprobs, tokenizer: "Tokenizer") -> dict[str, Any]:
    """Return one position: the token that stands there, and the most likely ones under `top`."""
    top = [token_record(token, tokenizer) for token in position.top]
    return {**token_record(position.sampled, tokenizer), "top": top}


def prompt_records(
    positions: Sequence[PositionLogprobs | None], tokenizer: "Tokenizer"
) -> list[dict[str, Any] | None]:
    """Return an entry a prompt token; null for the first, before which there is nothing."""
    return [None if one is None else position_record(one, tokenizer) for one in positions]


def token_record(token: TokenLogprob, tokenizer: "Tokenizer") -> dict[str, Any]:
    """Return one token with its logprob and rank."""
    return {
        "token_id": token.token_id,
        "token": tokenizer.token_text(token.token_id),
        "logprob": rounded(token),
        "rank": token.rank,
    }


def rounded(token: TokenLogprob) -> float:
    """Return a logprob as it is written."""
    return round(finite(token.logprob), 6)


def finite(logprob: float) -> float:
    """Return a finite figure, that of other servers where JSON has no infinity."""
    return logprob if math.isfinite(logprob) else _MINUS_INFINITY


def usage_record(usage: Usage, tokenizer: "Tokenizer") -> dict[str, Any]:
    """Return `usage` of a record."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        **cache_record(usage, tokenizer),
        "completion_tokens": usage.completion_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
    }


def cache_record(usage: Usage, tokenizer: "Tokenizer") -> dict[str, Any]:
    """Return what was reused, and why it was not more; the tokens that differ only where some do."""
    record: dict[str, Any] = {
        "cached_tokens": usage.cached_tokens,
        "kv_matched": usage.kv_matched,
        "state_at": usage.state_at,
        "miss_reason": usage.miss_reason,
    }
    divergence = usage.divergence
    if divergence is not None:
        record["divergence"] = {
            "position": divergence.position,
            "cached_id": divergence.cached_id,
            "cached_token": tokenizer.token_text(divergence.cached_id),
            "prompt_id": divergence.prompt_id,
            "prompt_token": tokenizer.token_text(divergence.prompt_id),
        }
    return record
