"""The table of measured figures, beside what the shipped file must reach."""

from collections.abc import Mapping
from pathlib import Path

from .shape import write_json

AT_LEAST = {
    "define": 0.99,
    "define_untrained": 0.97,
    "chain_turn_2": 0.97,
    "chain_turn_3": 0.97,
    "recall_4_pairs": 0.98,
    "recall_8_pairs": 0.98,
    "recall_16_pairs": 0.98,
    "recall_distance_512": 0.98,
    "recall_overwrite": 0.98,
    "unknown": 0.95,
}
AT_MOST = {"define_refused": 0.01}


def table(counts: Mapping[str, tuple[int, int]]) -> str:
    """Markdown, one row a kind."""
    lines = ["| check | exact | of | share | target |", "|---|---|---|---|---|"]
    for kind, (exact, total) in counts.items():
        target = ""
        if kind in AT_LEAST:
            met = exact >= AT_LEAST[kind] * total
            target = f">= {AT_LEAST[kind]:.0%}" + ("" if met else " MISSED")
        elif kind in AT_MOST:
            met = exact <= AT_MOST[kind] * total
            target = f"<= {AT_MOST[kind]:.0%}" + ("" if met else " MISSED")
        lines.append(f"| {kind} | {exact:,} | {total:,} | {exact / total:.2%} | {target} |")
    return "\n".join(lines)


def save(path: Path, counts: Mapping[str, tuple[int, int]], **about: object) -> None:
    figures = {kind: {"exact": e, "of": n} for kind, (e, n) in counts.items()}
    write_json(path, {**about, "figures": figures})
