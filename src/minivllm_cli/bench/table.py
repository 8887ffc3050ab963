"""Rows as text for people: at most 80 columns, each line complete when its row is."""

from collections.abc import Callable, Sequence
from typing import Any

from minivllm_cli.bench.document import device_title
from minivllm_engine.core.units import count_text, format_size

_Cell = Callable[[dict[str, Any]], str]


def head_lines(head: dict[str, Any], reps: int, warmup: int) -> list[str]:
    """What all rows have in common: model, device, versions."""
    env, device = head["env"], head["device"]
    commit = f" ({env['commit'][:9]})" if env["commit"] else ""
    return [
        f"{head['model']['name']} {device['dtype']}, state {device['state_dtype']} · "
        f"{device_title(device)} · {count_text(reps, 'rep')}, {count_text(warmup, 'warm-up')}",
        f"minivllm {env['minivllm']}{commit} · torch {env['torch']} · Python {env['python']}",
        f"reads memory at {_bandwidth(device['read_bytes_s'])} (measured now)",
        load_line(head["load"]),
    ]


def _bandwidth(bytes_s: float) -> str:
    return f"{bytes_s / 1e12:.2f} TB/s" if bytes_s >= 1e12 else f"{bytes_s / 1e9:.1f} GB/s"


def load_line(load: dict[str, Any]) -> str:
    """How long the start took, phase by phase."""
    text = f"start: weights {load['weights_s']:.1f} s"
    if load["compile_s"]:
        text += f" · compile {load['compile_s']:.1f} s"
    if load["graph_sizes"]:
        text += (
            f" · capture {load['capture_s']:.1f} s, {count_text(len(load['graph_sizes']), 'graph')}"
        )
    return text


class RowTable:
    """The lines of rows that share a title: `title`, the columns' names, a line a row."""

    def __init__(
        self, title: str, kind: str, variants: Sequence[str], percents: Sequence[float]
    ) -> None:
        width = max(map(len, ("variant", *variants)))
        self._title = title
        low, high = latency_percents(percents)
        label = f"{low}/{high}"
        self._columns: list[tuple[str, int, _Cell]] = [
            ("batch", 5, lambda row: f"{row['workload']['batch']:,}"),
            ("variant", -width, lambda row: row["variant"]),
            ("in/out", 14, in_out),
        ]
        rate = "prompt tok/s" if kind == "prefill" else "tok/s"
        # So that the widest lines, with the columns that follow, fit 80 columns.
        rate_width = 22 if kind in ("prefix", "stages", "jsonl") else 24
        self._columns.append((f"{rate} (min–max)", rate_width, lambda row: rate_text(row["tok_s"])))
        if kind in ("decode", "stages"):
            self._columns += [
                (f"ITL {label} ms", 14, lambda row: _both(row["itl_ms"], low, high)),
                ("limit", 6, lambda row: f"{row['limit_fraction']:.1%}"),
            ]
        else:
            self._columns.append(
                (f"TTFT {label}", 13, lambda row: _both(row["ttft_ms"], low, high))
            )
        if kind in ("prefix", "jsonl"):
            self._columns.append(("hit KV/used", 11, _hits))
        else:
            self._columns.append(("hit", 5, lambda row: f"{row['prefix_hit']:.1%}"))

    def head(self) -> list[str]:
        """The lines before the first row."""
        names = [_fit(name, width) for name, width, _ in self._columns]
        return ["", self._title, " ".join(names).rstrip()]

    def line(self, row: dict[str, Any]) -> str:
        """The line of a row."""
        cells = [_fit(cell(row), width) for _, width, cell in self._columns]
        return " ".join(cells).rstrip()


def latency_percents(percents: Sequence[float]) -> tuple[str, str]:
    """The two percentiles that a table shows: the lowest and the highest asked for."""
    return f"p{percents[0]:g}", f"p{percents[-1]:g}"


def _fit(text: str, width: int) -> str:
    return text.ljust(-width) if width < 0 else text.rjust(width)


def in_out(row: dict[str, Any]) -> str:
    """Tokens of a sample as they were counted: prompts and answers of all requests."""
    sample = row["samples"][-1]
    return f"{sample['in_tokens']:,}/{sample['out_tokens']:,}"


def rate_text(spread: dict[str, Any]) -> str:
    """A median with its smallest and largest value."""
    low, high = number(spread["min"]), number(spread["max"])
    return f"{number(spread['median'])} ({low}–{high})"


def number(value: float) -> str:
    """A figure with three significant digits or more."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _both(figures: dict[str, Any], low: str, high: str) -> str:
    return f"{number(figures[low])}/{number(figures[high])}" if figures else ""


def _hits(row: dict[str, Any]) -> str:
    return f"{row['kv_hit']:.1%}/{row['prefix_hit']:.1%}"


def pair_line(pair: dict[str, Any]) -> str:
    """Two variants beside each other."""
    base, other = pair["variants"]
    speed = pair["speed_up"]
    parts = []
    if speed is not None:
        spread = "" if speed["spread"] is None else f" ±{speed['spread']:.2f}"
        parts.append(f"{speed['ratio']:.2f}×{spread}")
    parts.append(f"tokens equal {pair['equal']:,}/{pair['of']:,}")
    text = f"      {other} / {base}: {' · '.join(parts)}"
    first = pair["first_divergence"]
    if first is not None:
        one, two = first["ids"]
        text += (
            f"\n      first differs: repetition {first['repetition']}, request {first['request']}, "
            f"token {first['position']}: {one} and {two}"
        )
        if pair["workload"]["kind"] == "stages":
            text += "; these variants sum in different orders (--help-metrics)"
    return text


def graphs_line(
    load: dict[str, Any], rows: Sequence[dict[str, Any]], kv_token_bytes: int
) -> str | None:
    """What the graphs cost, and after how many steps they have paid it back; None without graphs."""
    if not load["graph_sizes"]:
        return None
    text = (
        f"graphs: {count_text(len(load['graph_sizes']), 'size')} · capture {load['capture_s']:.1f} s · "
        f"{format_size(load['graph_bytes'])}"
    )
    if kv_token_bytes:
        text += f" = {load['graph_bytes'] // kv_token_bytes:,} KV tokens"
    paid = [f"{steps:,.0f} steps (batch {batch:,})" for batch, steps in payback_steps(load, rows)]
    return text + (f" · pays back after {', '.join(paid)}" if paid else "")


def payback_steps(load: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """Of each decode workload with both variants, its batch, and steps until the capture is paid back."""
    found = []
    for row in rows:
        if row["variant"] != "graph" or row["workload"]["kind"] != "decode":
            continue
        for other in rows:
            if other["variant"] == "eager" and other["workload"] == row["workload"]:
                saved = (other["itl_ms"]["mean"] - row["itl_ms"]["mean"]) / 1000
                if saved > 0:
                    found.append((row["workload"]["batch"], load["capture_s"] / saved))
    return found
