"""A plan as text: the mapping table, what is wrong, totals and needs, in the width that there is."""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from textwrap import wrap

from minivllm_cli.console.table import Column, table_text
from minivllm_engine.conversion.plan import MAPPING, Plan, Problem, Row
from minivllm_engine.conversion.problems import counted
from minivllm_engine.core.escape import escape
from minivllm_engine.core.units import count_text, format_size


def plan_text(plan: Plan, dst: Path | None, width: int | None) -> str:
    """Lay out the whole plan. No line of the table is wider than `width`, and none is cut.

    Args:
        width: of a terminal; None gives every row one line.
    """
    lines = _fill(
        [
            f"convert-weights --dry-run  {plan.source.path} → {dst or '(no DST given)'}",
            f"mapping {MAPPING}" + "".join(f" · {name}" for name in plan.style),
        ],
        width,
        gap="   ",
    )
    lines += mapping_table(plan.rows, width)
    lines += problem_lines(plan.problems, width)
    lines += totals(plan)
    return "".join(line + "\n" for line in lines)


def mapping_table(rows: Sequence[Row], width: int | None) -> list[str]:
    """Make a header and a row for each line; targets stand below sources where it is narrow."""
    cells = [_cells(row) for row in rows]
    names = ["n", "source", "→ target", "op", "dtype", "size"]
    columns = [
        Column(name, right=i in (0, 5), width=0 if i in (1, 2) else max(len(c[i]) for c in cells))
        for i, name in enumerate(names)
    ]
    wide = table_text(columns, cells).splitlines()
    if width is None or max(map(len, wide)) <= width:
        return wide
    columns[1] = Column("source → target")
    below = [
        line
        for count, source, target, *rest in cells
        for line in ([count, source, *rest], ["→", target.removeprefix("→ "), "", "", ""])
    ]
    return table_text([*columns[:2], *columns[3:]], below, width=width).splitlines()


def problem_lines(problems: Sequence[Problem], width: int | None) -> list[str]:
    """Write one problem a line, with the nearest names; below it where the line would be too long."""
    labels = [problem.kind.upper().replace("_", " ") for problem in problems]
    room = max(map(len, labels), default=0) + 2
    lines: list[str] = []
    for label, problem in zip(labels, problems, strict=True):
        parts = [f"{label:<{room}}{escape(problem.name)}"]
        if problem.detail:
            # A sentence: on a terminal it may go over several lines.
            parts += wrapped(problem.detail, width and width - room)
        elif problem.kind == "missing":
            parts.append("no source")
        near = [f"{escape(name)} ({count_text(n, 'edit')})" for name, n in problem.nearest]
        parts += [f"nearest: {name}" for name in near[:1]] + [f"or {name}" for name in near[1:]]
        lines += _fill(parts, width, gap="   ", indent=" " * room)
    return lines


def totals(plan: Plan) -> list[str]:
    """Sum up what the tensors become, how large it is, and what it takes."""
    rules = len({dropped.rule for dropped in plan.dropped})
    parts = [f"{count_text(len(plan.source.tensors), 'tensor')}: {plan.num_used:,} used"]
    if plan.dropped:
        parts.append(f"{len(plan.dropped):,} dropped by {count_text(rules, 'rule')}")
    parts += counted(plan.problems)
    files = count_text(len(plan.shards), "file")
    free = "" if plan.needs.disk_free is None else f" (free {format_size(plan.needs.disk_free)})"
    out = format_size(plan.bytes_out)
    if plan.bytes_head:
        # Headers do not tell; what is needed counts the larger.
        out += f" (or {format_size(plan.bytes_out + plan.bytes_head)}, if the head is not the embedding)"
    return [
        " · ".join(parts),
        f"in {format_size(plan.bytes_in)} → out {out} in {files}",
        f"disk needed {format_size(plan.needs.disk)}{free} · peak RAM {format_size(plan.needs.ram)}",
    ]


def wrapped(text: str, width: int | None) -> list[str]:
    """Wrap a sentence to lines of `width`; names are never parted, however long. One line for None."""
    if width is None:
        return [text]
    return wrap(text, width, break_long_words=False, break_on_hyphens=False)


def braces(names: Sequence[str]) -> str:
    """Join names: "in_proj_qkv.weight" and "in_proj_z.weight" are "in_proj_{qkv,z}.weight"."""
    if len(names) == 1:
        return names[0]
    before = _common_start(names)
    rest = [name[before:] for name in names]
    after = _common_start([part[::-1] for part in rest])
    middles = ",".join(part[: len(part) - after] for part in rest)
    return f"{names[0][:before]}{{{middles}}}{names[0][len(names[0]) - after :]}"


def _common_start(texts: Sequence[str]) -> int:
    """How many characters all texts begin with alike."""
    return sum(1 for _ in takewhile(lambda chars: len(set(chars)) == 1, zip(*texts, strict=False)))


def _cells(row: Row) -> list[str]:
    target = braces(row.targets) if row.targets else f"(dropped: rule {row.rule})"
    dtype = f"{row.dtype} kept" if row.kept else row.dtype or "–"
    op = row.op if row.targets else "–"
    size = format_size(row.num_bytes)
    return [f"{row.count:,}", escape(row.source), f"→ {target}", op, dtype, size]


def _fill(parts: Sequence[str], width: int | None, *, gap: str, indent: str = "  ") -> list[str]:
    """Parts on one line, or as many as fit, the rest on indented lines below. Words are never parted."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = lines[-1] + gap + part
        if width is None or len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(indent + part)
    return lines
