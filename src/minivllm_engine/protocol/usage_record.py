"""Tokens of a request as JSON, and what the prefix cache did for it."""

from typing import Any

from minivllm_engine.core.outputs import Usage
from minivllm_engine.protocol.token_logprobs import TokenText


def usage_record(usage: Usage, token_text: TokenText) -> dict[str, Any]:
    """`usage` of a record."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        **cache_record(usage, token_text),
        "completion_tokens": usage.completion_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
    }


def cache_record(usage: Usage, token_text: TokenText) -> dict[str, Any]:
    """What was reused, and why it was not more; the tokens that differ only where some do."""
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
            "cached_token": token_text(divergence.cached_id),
            "prompt_id": divergence.prompt_id,
            "prompt_token": token_text(divergence.prompt_id),
        }
    return record
