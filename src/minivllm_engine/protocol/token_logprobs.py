"""Logprobs as JSON: finite numbers, and each token with its text."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from minivllm_engine.core.outputs import PositionLogprobs, TokenLogprob

TokenText = Callable[[int], str]

_MINUS_INFINITY = -9999.0


def position_record(position: PositionLogprobs, token_text: TokenText) -> dict[str, Any]:
    """One position: the token that stands there, and the most likely ones under `top`."""
    top = [token_record(token, token_text) for token in position.top]
    return {**token_record(position.sampled, token_text), "top": top}


def prompt_records(
    positions: Sequence[PositionLogprobs | None], token_text: TokenText
) -> list[dict[str, Any] | None]:
    """An entry a prompt token; null for the first, before which there is nothing."""
    return [None if one is None else position_record(one, token_text) for one in positions]


def token_record(token: TokenLogprob, token_text: TokenText) -> dict[str, Any]:
    """One token with its logprob and rank."""
    return {
        "token_id": token.token_id,
        "token": token_text(token.token_id),
        "logprob": round(finite(token.logprob), 6),
        "rank": token.rank,
    }


def finite(logprob: float) -> float:
    """JSON has no infinity; the figure is the one that other servers write."""
    return logprob if math.isfinite(logprob) else _MINUS_INFINITY
