"""What was used of a cache, as text: pools, hit rates, the tree, misses and advice, at most 80 columns."""

import textwrap
from collections.abc import Iterator
from typing import Any

from minivllm_cli.console.table import Column, table_text
from minivllm_cli.inspect_cache.tree import WIDTH, TreeOptions, draw_tree
from minivllm_engine.core.units import count_text

_REASONS = {
    "new_prefix": "nothing in the cache goes on like this",
    "no_snapshot": "its KV was cached, but no state to go on from",
    "evicted": "it was cached, and given up for room",
    "below_granularity": "too short to hit",
    "template_divergence": "the chat tells an earlier answer otherwise",
    "disabled": "the cache is off",
}


def render_report(document: dict[str, Any], options: TreeOptions) -> str:
    """Render everything of the document, which has a `hit`, but the plan."""
    lines = [
        *_pool_lines(document["pools"]),
        "",
        *_hit_lines(document),
        "",
        *draw_tree(document["nodes"], options),
        *_evicted_line(document["evicted"]),
        *_miss_lines(document),
        *_paragraphs("warning", document["warnings"]),
        *_paragraphs("advice", document["advice"]),
    ]
    return "".join(line.rstrip() + "\n" for line in lines)


def _pool_lines(pools: dict[str, Any]) -> list[str]:
    rows = [
        (name, *(f"{pools[key][figure]:,}" for figure in ("used", "peak", "total")))
        for name, key in (("KV blocks", "kv"), ("state slots", "state"), ("snapshots", "snapshots"))
    ]
    columns = [Column("in use"), *(Column(name, right=True) for name in ("now", "peak", "of"))]
    return table_text(columns, rows).splitlines()


def _hit_lines(document: dict[str, Any]) -> Iterator[str]:
    hit, pools, nodes = document["hit"], document["pools"], document["nodes"]
    snapshots = pools["snapshots"]
    yield (
        f"prefix cache: {count_text(len(nodes), 'segment')} · "
        f"{pools['kv']['cached']:,}/{pools['kv']['total']:,} blocks"
        f" · snapshots {snapshots['used']:,}/{snapshots['total']:,}"
    )
    yield f"hits, of {hit['prompt_tokens']:,} prompt tokens in {count_text(hit['requests'], 'request')}:"
    yield f"  KV found  {hit['kv_tokens']:>12,}  {hit['kv']:>6.1%}"
    yield f"  usable    {hit['usable_tokens']:>12,}  {hit['usable']:>6.1%}  KV and a state were there"
    lost = hit["kv_tokens"] - hit["usable_tokens"]
    if lost:
        share = hit["kv"] - hit["usable"]
        yield f"  lost      {lost:>12,}  {share:>6.1%}  computed again: no state to go on from"
    if hit["restored_tokens"]:
        yield (
            f"  besides   {hit['restored_tokens']:>12,}"
            "          restored after preemption, or for an `n`"
        )


def _evicted_line(evicted: dict[str, int]) -> list[str]:
    return [
        f"evicted: {count_text(evicted['snapshots'], 'snapshot')}, "
        f"{count_text(evicted['kv_blocks'], 'KV block')}"
    ]


def _miss_lines(document: dict[str, Any]) -> Iterator[str]:
    counts = document["miss_counts"]
    total = sum(counts.values())
    yield f"misses: {total:,} of {count_text(document['hit']['requests'], 'request')}"
    rows = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    width = max((len(f"{count:,}") for count in counts.values()), default=0)
    for reason, count in rows:
        yield (
            f"  {reason:<19}  {count:>{width},}  {document['misses'][reason]:>4.0%}"
            f"  {_REASONS[reason]}"
        )


def _paragraphs(label: str, texts: list[str]) -> Iterator[str]:
    for text in texts:
        indent = " " * (len(label) + 2)
        yield from textwrap.wrap(
            f"{label}: {text}",
            WIDTH,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )
