"""The tree of cached prefixes: which segments are shown, in what order, and how it is drawn."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from minivllm_cli.errors import CliError
from minivllm_engine.core.units import count_text

WIDTH = 80
DEFAULT_LIMIT = 20
# A chat that goes on for long is a chain of segments: beyond this the indentation grows no more.
_MOST_INDENT = 15
_HASH_DIGITS = 8
_TEXT_CHARACTERS = 200

Node = dict[str, Any]


class SortKey(StrEnum):
    """Which segments come first, and are left when there are too many."""

    HITS = "hits"
    TOKENS = "tokens"
    AGE = "age"


_KINDS: dict[str, Callable[[Node], bool]] = {
    "snapshot": lambda node: node["snapshot"] is not None,
    "no-snapshot": lambda node: node["snapshot"] is None,
    "recomputed": lambda node: node["recomputed"] > 0,
    "held": lambda node: node["refs"] > 0,
    "unused": lambda node: node["hits"] == 0,
}


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """What is shown of a tree.

    Attributes:
        filters: words of `FILTERS`, or beginnings of hashes; a segment has to pass them all.
        limit: at most so many segments; those above them are shown too.
        with_text: the text of each segment below it, if the document has it.
    """

    sort: SortKey = SortKey.HITS
    filters: tuple[str, ...] = ()
    limit: int = DEFAULT_LIMIT
    with_text: bool = False


FILTERS = tuple(_KINDS)


def check_filters(filters: Sequence[str]) -> tuple[str, ...]:
    """Check `filters`, and return them as they are.

    Raises:
        CliError: one is neither a known word nor the beginning of a hash.
    """
    for word in filters:
        if word not in _KINDS and re.fullmatch(r"[0-9a-f]{4,32}", word) is None:
            raise CliError(
                f"--filter {word}: neither a kind of segment nor the beginning of a hash",
                why=f"the kinds are {', '.join(FILTERS)}; a hash has 4 to 32 of 0-9a-f",
                hint="--filter no-snapshot",
            )
    return tuple(filters)


def select(nodes: Sequence[Node], options: TreeOptions) -> list[Node]:
    """Select the segments that pass the filters, in order, at most `limit`."""
    order = _order(nodes, options.sort)
    passing = [node for node in nodes if all(_passes(node, word) for word in options.filters)]
    return sorted(passing, key=order)[: options.limit]


def draw_tree(nodes: Sequence[Node], options: TreeOptions) -> list[str]:
    """Draw lines of at most 80 columns, and say what was left out."""
    chosen = select(nodes, options)
    shown = _with_ancestors(nodes, chosen)
    below: dict[int, list[Node]] = defaultdict(list)
    for node in sorted(shown, key=_order(nodes, options.sort)):
        below[node["parent"]].append(node)
    rows = list(_rows(below))
    widths = [max((len(cells[i]) for _, cells, _, _ in rows), default=0) for i in range(6)]
    heads = max((len(prefix) + len(cells[0]) for prefix, cells, _, _ in rows), default=0)
    lines = [] if nodes else ["nothing is cached"]
    for prefix, cells, under, node in rows:
        lines += _segment_lines(prefix, cells, under, heads, widths)
        lines += [f"{under}  {text}" for text in _remarks(node)]
        if options.with_text:
            lines += _text_lines(node["text"], under + "  ")
    return lines + _left_out(nodes, chosen, shown, options)


def _order(nodes: Sequence[Node], sort: SortKey) -> Callable[[Node], tuple[int, int]]:
    # Each key is at least as good for a parent as for what is below it: so the best few are a tree.
    if sort is SortKey.HITS:
        return lambda node: (-node["hits"], node["id"])
    if sort is SortKey.AGE:
        youngest = _over_branch(nodes, lambda node: -node["age"], max)
        return lambda node: (-youngest[node["id"]], node["id"])
    tokens = _over_branch(nodes, lambda node: node["end"] - node["start"], lambda a, b: a + b)
    return lambda node: (-tokens[node["id"]], node["id"])


def _over_branch(
    nodes: Sequence[Node], value: Callable[[Node], int], join: Callable[[int, int], int]
) -> dict[int, int]:
    """For each segment, `value` joined over itself and all below it."""
    found = {node["id"]: value(node) for node in nodes}
    for node in reversed(nodes):  # parents come before children
        if node["parent"]:
            found[node["parent"]] = join(found[node["parent"]], found[node["id"]])
    return found


def _passes(node: Node, word: str) -> bool:
    return _KINDS[word](node) if word in _KINDS else node["hash"].startswith(word)


def _with_ancestors(nodes: Sequence[Node], chosen: Sequence[Node]) -> list[Node]:
    by_id = {node["id"]: node for node in nodes}
    shown: dict[int, Node] = {}
    for node in chosen:
        above: Node | None = node
        while above is not None and above["id"] not in shown:
            shown[above["id"]] = above
            above = by_id.get(above["parent"])
    return list(shown.values())


def _rows(below: dict[int, list[Node]]) -> Iterator[tuple[str, list[str], str, Node]]:
    """(branch before the segment, its cells, branch before lines under it, the segment)."""
    stack = [("", 0, node, node is below[0][-1]) for node in reversed(below[0])]
    while stack:
        indent, depth, node, last = stack.pop()
        children = below.get(node["id"], [])
        inner = _clipped(indent + ("   " if last else "│  "), depth + 1)
        yield (
            indent + ("└─ " if last else "├─ "),
            _cells(node),
            inner + ("│" if children else " "),
            node,
        )
        stack += [(inner, depth + 1, child, child is children[-1]) for child in reversed(children)]


def _clipped(indent: str, depth: int) -> str:
    if len(indent) <= _MOST_INDENT:
        return indent
    mark = f"{depth}:"
    return mark + indent[-(_MOST_INDENT - len(mark)) :]


def _cells(node: Node) -> list[str]:
    return [
        f"[{node['start']}..{node['end']})",
        str(node["blocks"]),
        str(node["hits"]),
        str(node["refs"]),
        "–" if node["snapshot"] is None else f"◆{node['snapshot']}",
        node["hash"][:_HASH_DIGITS],
    ]


def _segment_lines(
    prefix: str, cells: list[str], under: str, heads: int, widths: list[int]
) -> list[str]:
    _, blocks, hits, refs, snapshot, hash_ = (
        f"{cell:<{width}}" if i in (0, 4, 5) else f"{cell:>{width}}"
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    rest = f"{blocks} blk  hits {hits}  ref {refs}  {snapshot}  {hash_}"
    line = f"{prefix + cells[0]:<{heads}}  {rest}"
    # Where the figures are too large for one line, they get one of their own.
    return [line] if len(line) <= WIDTH else [prefix + cells[0], f"{under}    {rest}"]


def _remarks(node: Node) -> list[str]:
    if not node["recomputed"]:
        return []
    times = f"computed again {node['recomputed']:,}×"
    tokens = node["end"] - node["start"]
    if node["snapshot"] is None:
        return [f"↑ KV cached, no snapshot: {tokens:,} tokens {times}"]
    return [f"↑ {tokens:,} tokens {times}, before there was a snapshot"]


def _text_lines(text: str, indent: str) -> Iterator[str]:
    shown = escaped(text[:_TEXT_CHARACTERS])
    room = WIDTH - len(indent) - 2
    pieces = [shown[at : at + room] for at in range(0, len(shown), room)] or [""]
    for i, piece in enumerate(pieces):
        closing = "”" if i == len(pieces) - 1 else ""
        yield f"{indent}{' ' if i else '“'}{piece}{closing}"
    if len(text) > _TEXT_CHARACTERS:
        yield f"{indent} … and {len(text) - _TEXT_CHARACTERS:,} characters more (--json has them)"


def escaped(text: str) -> str:
    """Write `text` in ASCII and letters of one column: everything else as Python would write it."""
    return "".join(c if c.isascii() and c.isprintable() else _escape(c) for c in text)


def _escape(char: str) -> str:
    # Letters of Western scripts are as wide as they are long; of others nobody knows here.
    if char.isalpha() and ord(char) < 0x250:
        return char
    return char.encode("unicode_escape").decode()


def _left_out(
    nodes: Sequence[Node], chosen: Sequence[Node], shown: Sequence[Node], options: TreeOptions
) -> list[str]:
    passing = len(select(nodes, TreeOptions(options.sort, options.filters, len(nodes))))
    lines = []
    if options.filters:
        above = len(shown) - len(chosen)
        what = (
            f"{passing:,} of {count_text(len(nodes), 'segment')} pass: {', '.join(options.filters)}"
        )
        lines.append(what + (f" (and {above:,} above them)" if above else ""))
    if passing > len(chosen):
        lines.append(
            f"… {count_text(passing - len(chosen), 'segment')} more; --limit {passing} shows all of them"
        )
    return lines
