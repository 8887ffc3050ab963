"""Figures of an answer in words: the line after it, what the prefix cache did for it, what a file keeps."""

from typing import TYPE_CHECKING, Any

from minivllm_engine.core.outputs import Divergence, RequestOutput, Usage
from minivllm_engine.core.snapshot_interval import snapshot_interval
from minivllm_engine.core.units import count_text

if TYPE_CHECKING:
    from minivllm_engine.text.tokenizer import Tokenizer

CONTEXT_WARNING_SHARE = 0.8


def saved_figures(output: RequestOutput) -> dict[str, Any]:
    """Return the `stats` of a saved answer; None where it did not come to that."""
    usage, timing = output.usage, output.timing
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "ttft_s": None if timing.ttft_s is None else round(timing.ttft_s, 4),
        "tok_s": round(1 / timing.tpot_s, 2) if timing.tpot_s else None,
        "seed": None if output.params is None else output.params.seed,
    }


def context_used(output: RequestOutput) -> int:
    """Count the tokens of the context that prompt and answer take."""
    return output.usage.prompt_tokens + output.usage.completion_tokens


def statistics_line(output: RequestOutput, max_model_len: int) -> str:
    """Return the one line after an answer. Speed is that of decoding: tokens after the first."""
    usage, timing = output.usage, output.timing
    used = context_used(output)
    parts = [f"{usage.completion_tokens:,} tok"]
    if timing.tpot_s:
        parts.append(f"{1 / timing.tpot_s:,.1f} tok/s")
    if timing.ttft_s is not None:
        parts.append(f"TTFT {timing.ttft_s:.2f} s")
    parts.append(f"prompt {reuse_text(usage.prompt_tokens, usage.cached_tokens)}")
    parts.append(f"ctx {used:,}/{max_model_len:,} ({100 * used // max_model_len}%)")
    if output.finish_reason is not None:
        parts.append(str(output.finish_reason))
    return " · ".join(parts)


def reuse_text(prompt_tokens: int, cached_tokens: int) -> str:
    """Tell prompt tokens by where they came from: "1,690 = 1,152 reused + 538 new"."""
    new = prompt_tokens - cached_tokens
    return f"{prompt_tokens:,} = {cached_tokens:,} reused + {new:,} new"


def context_warning(used: int, max_model_len: int) -> str | None:
    """Return a warning once most of the context is used, or None."""
    if used < CONTEXT_WARNING_SHARE * max_model_len:
        return None
    left = max(max_model_len - used, 0)
    return f"the context is {100 * used // max_model_len}% full: {left:,} tokens are left"


def thought_line(num_tokens: int, seconds: float) -> str:
    """Return what stands between thinking and answer."""
    return f"· thought {num_tokens:,} tok, {seconds:.1f} s"


def recompute_text(total: int, state_at: int) -> str:
    """Tell what a history of `total` tokens costs where a snapshot lies at `state_at`; 0 for none."""
    left = f"{count_text(total - state_at, 'token')} to recompute"
    return f"snapshot at {state_at:,}, {left}" if state_at else left


def shortfall(usage: Usage, tokenizer: "Tokenizer", *, thinking_dropped: bool) -> str | None:
    """Return the line below the statistics if less was reused than the conversation allows, or None.

    Args:
        thinking_dropped: there was thinking before this turn, which is not sent again but could be.
    """
    start = _stopped_at(usage)
    match usage.miss_reason:
        case "template_divergence" if usage.divergence is not None:
            return start + _divergence_text(usage.divergence, tokenizer, thinking_dropped)
        case "no_snapshot":
            return f"{start}KV goes on to {usage.kv_matched:,}, but no state was kept there."
        case "evicted":
            return (
                f"{start}what comes after it had to make room. "
                "A larger --set cache.snapshot_memory or cache.num_blocks keeps more."
            )
    return None


def explanation(
    usage: Usage, tokenizer: "Tokenizer", *, thinking_dropped: bool, block_size: int
) -> str:
    """Tell why a turn reused as much as it did, and no more."""
    text = shortfall(usage, tokenizer, thinking_dropped=thinking_dropped)
    if text is not None:
        return text
    start, unit = _stopped_at(usage), snapshot_interval(block_size)
    match usage.miss_reason:
        case "disabled":
            return "nothing was reused: the prefix cache is off (cache.prefix_cache)"
        case "below_granularity":
            return (
                f"nothing was reused: the prompt has {usage.prompt_tokens:,} tokens, "
                f"and reuse comes in units of {unit}"
            )
        case "new_prefix":
            # How many tokens of that unit are the same is in no record: only whole blocks are kept.
            return (
                f"{start}it comes in units of {unit} tokens, "
                "and nothing in the cache is the same for the whole of the next one"
            )
    return (
        f"all that could be reused was: {usage.cached_tokens:,} of {usage.prompt_tokens:,} tokens, "
        f"in units of {unit}"
    )


def _stopped_at(usage: Usage) -> str:
    return f"reuse stopped at {usage.cached_tokens:,}: "


def _divergence_text(divergence: Divergence, tokenizer: "Tokenizer", thinking_dropped: bool) -> str:
    ids = divergence.cached_id, divergence.prompt_id
    was, now = (_quoted(tokenizer.token_text(token)) for token in ids)
    removed = tokenizer.think_ids is not None and divergence.cached_id == tokenizer.think_ids[0]
    cause = "; thinking was removed by the template" if removed else ""
    remedy = " /think keep avoids it." if removed and thinking_dropped else ""
    return f"history changed at token {divergence.position:,} ({was} → {now}{cause}).{remedy}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\n", "\\n") + '"'
