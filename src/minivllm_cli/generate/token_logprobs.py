"""Logprobs as JSON: finite numbers, and each token with its text."""

import math
from collections.abc import Callable
from typing import Any

from minivllm_engine.request import PositionLogprobs, TokenLogprob

TokenText = Callable[[int], str]

_MINUS_INFINITY = -9999.0


def position_record(position: PositionLogprobs, token_text: TokenText) -> dict[str, Any]:
    """One generated position: the sampled token, and the likeliest ones under `top`."""
    top = [token_record(token, token_text) for token in position.top]
    return {**token_record(position.sampled, token_text), "top": top}


def token_record(token: TokenLogprob, token_text: TokenText) -> dict[str, Any]:
    """One token with its logprob and rank."""
    # JSON has no infinity; the figure is the one that other servers write.
    finite = math.isfinite(token.logprob)
    return {
        "token_id": token.token_id,
        "token": token_text(token.token_id),
        "logprob": round(token.logprob, 6) if finite else _MINUS_INFINITY,
        "rank": token.rank,
    }
