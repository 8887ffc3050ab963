"""A comparison as text: the settings that differ, then a line a row."""

from collections.abc import Sequence
from typing import Any

from minivllm_cli.bench.table import number
from minivllm_cli.console.streams import strip_controls
from minivllm_engine.core.escape import escape

_LABELS = {"prompt_len": "prompt", "gen_len": "gen", "num_prompts": "requests", "depth": "depth"}


def render_comparison(document: dict[str, Any], *, markdown: bool) -> str:
    """The document of `--compare`, as a table or as Markdown."""
    lines = []
    for section in ("config", "env"):
        for key, base, new in document["differs"][section]:
            mark = "- " if markdown else ""
            lines.append(f"{mark}{section} {escape(key, 60)}: {_shown(base)} → {_shown(new)}")
    if lines:
        lines.append("")
    lines += _table(document, markdown=markdown)
    # Files come from anywhere, and this goes to a terminal.
    return "".join(f"{strip_controls(line).rstrip()}\n" for line in lines)


def _shown(value: Any) -> str:
    return "unset" if value is None else escape(value, 60)


def _table(document: dict[str, Any], *, markdown: bool) -> list[str]:
    """A heading a workload, and a line for each batch and variant of it."""
    names = ["batch", "variant", f"{document['metric']} BASE", "NEW", "Δ %", "95 %", "verdict"]
    rows = [(_title(row["workload"]), _cells(row)) for row in document["rows"]]
    if markdown:
        body = [["workload", *names], ["---"] * (len(names) + 1)]
        body += [[title, *cells] for title, cells in rows]
        return ["| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |" for cells in body]
    widths = [max(len(cells[i]) for cells in (names, *(c for _, c in rows))) for i in range(7)]
    lines = [_line(names, widths)]
    last = None
    for title, cells in rows:
        if title != last:
            lines.append(title)
            last = title
        lines.append(_line(cells, widths))
    return lines


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    left = (1, 6)  # variant and verdict
    return "  " + "  ".join(
        cell.ljust(width) if i in left else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )


def _title(workload: dict[str, Any]) -> str:
    parts = [str(workload.get("kind"))]
    for key, value in workload.items():
        if key not in ("kind", "batch") and not (
            key == "num_prompts" and value == workload.get("batch")
        ):
            parts.append(f"{_LABELS.get(key, key)} {value}")
    return " · ".join(parts)


def row_title(workload: dict[str, Any], variant: str) -> str:
    """A row in a message: "decode · depth 4 · gen 8 · batch 1 · graph"."""
    return f"{_title(workload)} · batch {workload['batch']} · {variant}"


def _cells(row: dict[str, Any]) -> list[str]:
    interval = row["interval"]
    shown = "too few" if interval is None else f"{interval[0]:+.1%} … {interval[1]:+.1%}"
    return [
        str(row["workload"].get("batch")),
        row["variant"],
        number(row["base"]),
        number(row["new"]),
        f"{row['change']:+.1%}",
        shown,
        row["verdict"],
    ]
