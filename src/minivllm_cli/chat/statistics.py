"""Figures of an answer: the line after it, the warning of a filling context, what a saved file keeps."""

from typing import Any

from minivllm_engine.core.outputs import RequestOutput

CONTEXT_WARNING_SHARE = 0.8


def saved_figures(output: RequestOutput) -> dict[str, Any]:
    """The `stats` of a saved answer; None where it did not come to that."""
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
    """Tokens of the context that prompt and answer take."""
    return output.usage.prompt_tokens + output.usage.completion_tokens


def statistics_line(output: RequestOutput, max_model_len: int) -> str:
    """The one line after an answer. Speed is that of decoding: tokens after the first."""
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
    """Prompt tokens by where they came from: "1,690 = 1,152 reused + 538 new"."""
    new = prompt_tokens - cached_tokens
    return f"{prompt_tokens:,} = {cached_tokens:,} reused + {new:,} new"


def context_warning(used: int, max_model_len: int) -> str | None:
    """A warning once most of the context is used."""
    if used < CONTEXT_WARNING_SHARE * max_model_len:
        return None
    left = max(max_model_len - used, 0)
    return f"the context is {100 * used // max_model_len}% full: {left:,} tokens are left"


def thought_line(num_tokens: int, seconds: float) -> str:
    """What stands between thinking and answer."""
    return f"· thought {num_tokens:,} tok, {seconds:.1f} s"
