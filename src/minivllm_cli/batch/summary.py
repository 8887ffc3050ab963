"""The summary as a table on stderr, with one line of advice where something can be done."""

from collections.abc import Mapping
from typing import Any

from minivllm_cli.batch.tally import Tally
from minivllm_cli.batch.verify import verify_text
from minivllm_engine.core.units import count_text

_MANY_CUT = 0.05
_KINDS = {
    "messages": "chat",
    "prompt": "prompt",
    "text": "text line",
    "tokens": "token-id prompt",
    "batch": "batch line",
    "bad": "bad line",
}


def render_summary(
    tally: Tally, kinds: dict[str, int], num_blank: int, output: str | None
) -> list[str]:
    """Lines of two columns. `kinds` counts the input's lines; `output` is the file written."""
    document = tally.summary()
    tokens, seconds, rates = document["tokens"], document["seconds"], document["tok_s"]
    rows = [
        ("input", _input_text(kinds, num_blank)),
        ("requests", _requests_text(tally)),
        ("tokens", _tokens_text(tokens)),
        ("cache", _cache_text(tally)),
        (
            "time",
            f"{seconds['wall']:.1f} s = load {seconds['load']:.1f} + generate {seconds['generate']:.1f}"
            " + other",
        ),
        ("speed", f"out {rates['out']:,.1f} tok/s · in {rates['in']:,.1f} tok/s"),
        ("TTFT", _percentile_text(document["ttft_s"])),
        ("E2E", _percentile_text(document["e2e_s"])),
    ]
    if tally.stats is not None:
        stats = tally.stats
        rows.append(
            (
                "peak",
                f"KV {stats.kv_blocks_peak:,}/{stats.kv_blocks_total:,} blocks · "
                f"state {stats.state_slots_peak}/{stats.state_slots_total} slots · "
                f"snap {stats.snapshots_peak}/{stats.snapshots_total} · "
                f"preempted {stats.num_preemptions}",
            )
        )
    if tally.verify is not None:
        rows.append(("verify", verify_text(tally.verify)))
    if output is not None:
        rows.append(("output", output))
    limits = document["limited_by"]
    if limits:
        text = " · ".join(f"{name} {share:.0%} of steps" for name, share in limits.items())
        rows.append(("limited by", text))
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows if text]


def cut_short(tally: Tally, num_own: int, num_lines: int, *, forced: bool) -> str | None:
    """What to say when many outputs ended at max_tokens.

    Args:
        num_own: of `num_lines` good lines, how many have a max_tokens of their own.
        forced: `--force-param` sets it, for all of them.
    """
    ended = sum(tally.ended.values())
    cut = tally.ended["length"]
    if not ended or cut / ended <= _MANY_CUT:
        return None
    what = f"{cut} of {count_text(ended, 'output')} stopped at max_tokens"
    if forced:
        return f"{what}, which --force-param max_tokens sets; a larger one gives them more room"
    if not num_own:
        return f"{what}; --max-tokens N gives them more room"
    who = (
        "the lines set"
        if num_own == num_lines
        else f"{num_own} of {num_lines} lines set themselves"
    )
    others = "" if num_own == num_lines else ", and --max-tokens N the others"
    return f"{what}, which {who}; a larger max_tokens there gives them more room{others}"


def failure_text(tally: Tally, total: int) -> str:
    """How many requests failed, and of what."""
    causes = ", ".join(f"{code} {n}" for code, n in tally.failed.most_common())
    return f"{tally.num_failed} of {count_text(total, 'request')} failed: {causes}"


def kinds_text(kinds: Mapping[str, int]) -> list[str]:
    """How many lines there are of each kind that there is: "8 chats", "1 prompt"."""
    return [count_text(n, _KINDS[kind]) for kind, n in kinds.items() if n]


def _input_text(kinds: dict[str, int], num_blank: int) -> str:
    parts = kinds_text(kinds)
    if num_blank:
        parts.append(f"{num_blank:,} blank skipped")
    return " · ".join(parts)


def _requests_text(tally: Tally) -> str:
    parts = [f"{tally.num_ok:,} ok", f"{tally.num_failed:,} failed"]
    parts += [f"{n:,} ended at {r}" for r, n in tally.ended.items() if r in ("length", "context")]
    if tally.num_truncated:
        parts.append(f"{tally.num_truncated:,} truncated")
    if tally.num_resumed:
        parts.append(f"{tally.num_resumed:,} from an earlier run")
    return " · ".join(parts)


def _tokens_text(tokens: dict[str, int]) -> str:
    new = tokens["in"] - tokens["cached"]
    text = (
        f"in {tokens['in']:,} = {tokens['cached']:,} reused + {new:,} new · out {tokens['out']:,}"
    )
    return text + (f" · reasoning {tokens['reasoning']:,}" if tokens["reasoning"] else "")


def _cache_text(tally: Tally) -> str:
    parts = [f"hit {tally.hit:.0%}"]
    if tally.misses:
        parts.append("misses: " + ", ".join(f"{r} {n:,}" for r, n in tally.misses.most_common()))
    if tally.stats is not None and tally.stats.restored_tokens:
        # No reuse of another request's work, so it is in no other figure.
        restored = tally.stats.restored_tokens
        parts.append(f"restored {restored:,} tokens after preemptions and for further outputs")
    return " · ".join(parts)


def _percentile_text(values: dict[str, Any]) -> str:
    return " · ".join(f"{name} {value:.3f} s" for name, value in values.items())
