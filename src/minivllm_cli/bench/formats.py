"""Rows as Markdown and CSV: every figure of a row in a column of its own."""

import csv
import io
from collections.abc import Sequence
from typing import Any

from minivllm_cli.bench.table import latency_percents, number, rate_text

_WORKLOAD = ("kind", "batch", "depth", "prompt_len", "gen_len", "num_prompts", "groups", "file")
_LATENCIES = ("itl_ms", "ttft_ms", "queue_ms", "tpot_ms", "e2e_ms")


def csv_head(percents: Sequence[float]) -> str:
    """The line of names."""
    names = [
        *_WORKLOAD,
        "variant",
        "in_tokens",
        "out_tokens",
        "n",
        "tok_s",
        "tok_s_min",
        "tok_s_max",
    ]
    names += ["limit_fraction", "prefix_hit", "kv_hit", "peak_bytes"]
    names += [f"{name}_p{p:g}" for name in _LATENCIES for p in percents]
    return _csv_line(names)


def csv_line(row: dict[str, Any], percents: Sequence[float]) -> str:
    """The line of a row; what it does not have is empty."""
    sample, rates = row["samples"][-1], row["tok_s"]
    cells = [row["workload"].get(name) for name in _WORKLOAD]
    cells += [row["variant"], sample["in_tokens"], sample["out_tokens"], rates["n"]]
    cells += [rates["median"], rates["min"], rates["max"]]
    cells += [row["limit_fraction"], row["prefix_hit"], row["kv_hit"], row["peak_bytes"]]
    cells += [row[name].get(f"p{p:g}") for name in _LATENCIES for p in percents]
    return _csv_line(cells)


def _csv_line(cells: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def md_head(percents: Sequence[float]) -> str:
    """The two lines before the first row."""
    low, high = latency_percents(percents)
    names = ["workload", "batch", "variant", "tok/s (min–max)", f"ITL {low}/{high} ms"]
    names += [f"TTFT {low}/{high} ms", "limit", "prefix hit"]
    return _md_line(names) + _md_line(["---"] * len(names))


def md_line(row: dict[str, Any], title: str, percents: Sequence[float]) -> str:
    """The line of a row."""
    low, high = latency_percents(percents)
    limit = row["limit_fraction"]
    cells = [title, f"{row['workload']['batch']}", row["variant"], rate_text(row["tok_s"])]
    for name in ("itl_ms", "ttft_ms"):
        found = row[name]
        cells.append(f"{number(found[low])}/{number(found[high])}" if found else "")
    cells += ["" if limit is None else f"{limit:.1%}", f"{row['prefix_hit']:.1%}"]
    return _md_line(cells)


def _md_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
