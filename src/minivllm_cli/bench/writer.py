"""Results on their way out, each row as soon as it is finished: a table, Markdown, CSV or JSON."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from minivllm_cli.bench.document import device_title
from minivllm_cli.bench.flags import Format
from minivllm_cli.bench.workload import workload_title
from minivllm_cli.console.streams import Console, Results
from minivllm_cli.console.table import Column, table_text
from minivllm_engine.core.units import count_text, format_size
from minivllm_engine.protocol.strict_json import dump_line

_Row = dict[str, Any]
_Columns = list[tuple[Column, Callable[[_Row], Any]]]
_WORKLOAD = ("kind", "batch", "depth", "prompt_len", "gen_len", "num_prompts", "groups", "file")
_LATENCIES = ("itl_ms", "ttft_ms", "queue_ms", "tpot_ms", "e2e_ms")


class ResultWriter:
    """Writes to stdout. With `--format json` the table goes to stderr, and the document to stdout at the
    end."""

    def __init__(
        self, results: Results, console: Console, output: Format, percents: Sequence[float]
    ) -> None:
        self._results, self._console = results, console
        self._format, self._percents = output, percents
        self._is_table = output in (Format.TABLE, Format.JSON)
        self._columns = (
            _all_columns(percents)
            if output is Format.CSV
            else [_columns(percents)[name] for name in _MD]
        )
        self._title: str | None = None

    def begin(self, head: dict[str, Any], reps: int, warmup: int) -> None:
        """Write what comes before the first row."""
        names = [column.name for column, _ in self._columns]
        if self._is_table:
            self._table("".join(f"{line}\n" for line in _head_lines(head, reps, warmup)))
        elif self._format is Format.CSV:
            self._results.write_text(csv_line(names))
        elif self._format is Format.MD:
            self._results.write_text(md_line(names) + md_line(["---"] * len(names)))

    def rows(self, rows: Sequence[_Row]) -> None:
        """Write the rows of a workload."""
        if self._is_table:
            for row in rows:
                title = workload_title(row["workload"])
                self._table(rows_text([row], self._percents, heading=title != self._title))
                self._title = title
        elif self._format is Format.JSONL:
            self._lines("bench-row", rows)
        else:
            line = csv_line if self._format is Format.CSV else md_line
            for row in rows:
                self._results.write_text(line([cell(row) for _, cell in self._columns]))

    def pairs(self, pairs: Sequence[dict[str, Any]]) -> None:
        """Write variants beside each other."""
        if self._is_table:
            self._table("".join(f"{pair_line(pair)}\n" for pair in pairs))
        elif self._format is Format.JSONL:
            self._lines("bench-pair", pairs)

    def end(self, document: dict[str, Any], kv_token_bytes: int) -> None:
        """Write what comes after the last row."""
        line = graphs_line(document["load"], document["rows"], kv_token_bytes)
        if self._is_table and line is not None:
            self._table(f"\n{line}\n")
        if self._format is Format.JSON:
            self._results.write(dump_line(document))

    def _lines(self, kind: str, entries: Sequence[dict[str, Any]]) -> None:
        for entry in entries:
            self._results.write(dump_line({"schema_version": 1, "kind": kind, **entry}))

    def _table(self, text: str) -> None:
        if self._format is Format.TABLE:
            self._results.write_text(text)
        else:
            for line in text.splitlines():
                self._console.note(line)


def csv_line(cells: Sequence[Any]) -> str:
    """Write cells as a line of CSV; None is empty."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def md_line(cells: Sequence[Any]) -> str:
    """Write cells as a line of a Markdown table."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |\n"


def _all_columns(percents: Sequence[float]) -> _Columns:
    """Every figure of a row in a column of its own."""

    def of(*keys: str) -> Callable[[_Row], Any]:
        return lambda row: row[keys[0]] if len(keys) == 1 else row[keys[0]].get(keys[1])

    def of_sample(key: str) -> Callable[[_Row], Any]:
        return lambda row: row["samples"][-1][key]

    columns = {name: of("workload", name) for name in _WORKLOAD}
    columns |= {"variant": of("variant")}
    columns |= {name: of_sample(name) for name in ("in_tokens", "out_tokens")}
    columns |= {"n": of("tok_s", "n"), "tok_s": of("tok_s", "median")}
    columns |= {f"tok_s_{name}": of("tok_s", name) for name in ("min", "max")}
    columns |= {n: of(n) for n in ("limit_fraction", "prefix_hit", "kv_hit", "peak_bytes")}
    columns |= {f"{name}_p{p:g}": of(name, f"p{p:g}") for name in _LATENCIES for p in percents}
    return [(Column(name), cell) for name, cell in columns.items()]


def _columns(percents: Sequence[float]) -> dict[str, tuple[Column, Callable[[_Row], Any]]]:
    """What people look for; as wide as rows of an ordinary size are, so that rows align."""
    label = "/".join(_shown(percents))
    return {
        "title": (Column("workload"), lambda row: workload_title(row["workload"])),
        "batch": (Column("batch", right=True), lambda row: f"{row['workload']['batch']:,}"),
        "variant": (Column("variant", width=8), lambda row: row["variant"]),
        "cold": (Column("variant", width=10), lambda row: row["variant"]),
        "in/out": (Column("in/out", right=True, width=9), _in_out),
        "rate": (Column("tok/s (min–max)", right=True, width=20), _rate),
        "prompts": (Column("prompt tok/s (min–max)", right=True), _rate),
        "itl": (
            Column(f"ITL {label} ms", right=True),
            lambda row: _latency(row["itl_ms"], percents),
        ),
        "ttft": (
            Column(f"TTFT {label} ms", right=True),
            lambda row: _latency(row["ttft_ms"], percents),
        ),
        "limit": (Column("limit", right=True, width=6), _limit),
        "hit": (Column("hit", right=True, width=5), lambda row: f"{row['prefix_hit']:.1%}"),
        "hits": (
            Column("hit KV/used", right=True),
            lambda row: f"{row['kv_hit']:.1%}/{row['prefix_hit']:.1%}",
        ),
    }


_MD = ("title", "batch", "variant", "rate", "itl", "ttft", "limit", "hits")
_TABLES = {
    "prefill": ("batch", "variant", "in/out", "prompts", "ttft", "hit"),
    "decode": ("batch", "variant", "in/out", "rate", "itl", "limit", "hit"),
    "stages": ("batch", "variant", "in/out", "rate", "itl", "limit", "hit"),
    "mixed": ("batch", "cold", "in/out", "rate", "ttft", "hit"),
    "prefix": ("batch", "cold", "in/out", "rate", "ttft", "hits"),
    "jsonl": ("batch", "variant", "in/out", "rate", "ttft", "hits"),
}


def rows_text(rows: Sequence[_Row], percents: Sequence[float], *, heading: bool) -> str:
    """Lay out rows of one workload as lines of a table; with a heading, below their title."""
    workload = rows[0]["workload"]
    known = _columns(percents)
    found = [known[name] for name in _TABLES[workload["kind"]]]
    columns = [replace(column, width=max(column.width, len(column.name))) for column, _ in found]
    cells = [[cell(row) for _, cell in found] for row in rows]
    text = table_text(columns, cells, heading=heading)
    return f"\n{workload_title(workload)}\n{text}" if heading else text


def _head_lines(head: dict[str, Any], reps: int, warmup: int) -> list[str]:
    """What all rows have in common: model, device, versions, the start phase by phase."""
    env, device, load = head["env"], head["device"], head["load"]
    commit = f" ({env['commit'][:9]})" if env["commit"] else ""
    speed = device["read_bytes_s"]
    shown = f"{speed / 1e12:.2f} TB/s" if speed >= 1e12 else f"{speed / 1e9:.1f} GB/s"
    start = f"start: weights {load['weights_s']:.1f} s"
    if load["compile_s"]:
        start += f" · compile {load['compile_s']:.1f} s"
    if load["graph_sizes"]:
        graphs = count_text(len(load["graph_sizes"]), "graph")
        start += f" · capture {load['capture_s']:.1f} s, {graphs}"
    return [
        f"{head['model']['name']} {device['dtype']}, state {device['state_dtype']} · "
        f"{device_title(device)} · {count_text(reps, 'rep')}, {count_text(warmup, 'warm-up')}",
        f"minivllm {env['minivllm']}{commit} · torch {env['torch']} · Python {env['python']}",
        f"reads memory at {shown} (measured now)",
        start,
    ]


def number(value: float) -> str:
    """Write a figure with three significant digits or more."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _shown(percents: Sequence[float]) -> tuple[str, str]:
    """The two percentiles that a table shows: the lowest and the highest asked for."""
    return f"p{percents[0]:g}", f"p{percents[-1]:g}"


def _latency(figures: dict[str, Any], percents: Sequence[float]) -> str:
    return "/".join(number(figures[name]) for name in _shown(percents)) if figures else ""


def _rate(row: _Row) -> str:
    rates = row["tok_s"]
    return f"{number(rates['median'])} ({number(rates['min'])}–{number(rates['max'])})"


def _in_out(row: _Row) -> str:
    """Tokens of a sample as they were counted: prompts and answers of all requests."""
    sample = row["samples"][-1]
    return f"{sample['in_tokens']:,}/{sample['out_tokens']:,}"


def _limit(row: _Row) -> str:
    return "" if row["limit_fraction"] is None else f"{row['limit_fraction']:.1%}"


def pair_line(pair: dict[str, Any]) -> str:
    """Write two variants beside each other; a second line says where their tokens part first."""
    base, other = pair["variants"]
    speed, parts = pair["speed_up"], []
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


def graphs_line(load: dict[str, Any], rows: Sequence[_Row], kv_token_bytes: int) -> str | None:
    """Write what graphs cost, and after how many steps they have paid it back; None without graphs."""
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


def payback_steps(load: dict[str, Any], rows: Sequence[_Row]) -> list[tuple[int, float]]:
    """Count, for the batch of each decode workload, the steps until the capture is paid back."""
    decodes = [row for row in rows if row["workload"]["kind"] == "decode"]
    eager = {str(r["workload"]): r["itl_ms"]["mean"] for r in decodes if r["variant"] == "eager"}
    found = []
    for row in decodes:
        key = str(row["workload"])
        if row["variant"] == "graph" and key in eager:
            saved = (eager[key] - row["itl_ms"]["mean"]) / 1000
            if saved > 0:
                found.append((row["workload"]["batch"], load["capture_s"] / saved))
    return found
