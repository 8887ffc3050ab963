"""The mapping as a table: tensors that share a pattern, an operation and a type are one line."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from minivllm_engine.checkpoint.names import without_wrappers
from minivllm_engine.conversion.matching import Match
from minivllm_engine.conversion.plan import Dropped, Piece, Row, TargetTensor
from minivllm_engine.conversion.problems import pattern_of
from minivllm_engine.conversion.targets import SHORT_DTYPES

# Parts of a model that are left out as a whole are one line each: `model.visual.**`.
_WHOLE_PARTS = {"text-only": ("visual", "vision_tower", "vision_model"), "mtp": ("mtp",)}


@dataclass
class _Group:
    count: int = 0
    num_bytes: int = 0
    targets: dict[str, None] = field(default_factory=dict)


def table_rows(
    found: Sequence[Match], dropped: Sequence[Dropped], targets: Sequence[TargetTensor]
) -> tuple[Row, ...]:
    """Lines in the order of the model, what is dropped at the end."""
    by_name = {target.name: target for target in targets}
    order = {target.name: position for position, target in enumerate(targets)}
    sources: defaultdict[str, set[str]] = defaultdict(set)
    for match in found:
        for piece in match.pieces:
            sources[piece.target].add(piece.source)
    groups: defaultdict[tuple[str, str, str, str, bool], _Group] = defaultdict(_Group)
    for match in sorted(found, key=lambda match: order[match.pieces[0].target]):
        entry = match.tensor.entry
        after = {by_name[piece.target].dtype for piece in match.pieces}
        key = (
            pattern_of(entry.name),
            match.rule.name,
            operation(match, sources),
            _dtype(SHORT_DTYPES[entry.dtype], after),
            any(by_name[piece.target].kept for piece in match.pieces),
        )
        group = groups[key]
        group.count += 1
        group.num_bytes += entry.num_bytes
        group.targets |= dict.fromkeys(pattern_of(piece.target) for piece in match.pieces)
    rows = [
        Row(source, g.count, tuple(g.targets), rule, op, dtype, kept, g.num_bytes)
        for (source, rule, op, dtype, kept), g in groups.items()
    ]
    return (*rows, *_dropped_rows(dropped))


def operation(match: Match, sources: Mapping[str, set[str]]) -> str:
    """What is done to a source tensor, in words. sources: target -> the tensors it is made of."""
    first = match.pieces[0]
    if first.transform == "minus_one":
        return "w - 1"
    if first.transform == "conv_axis":
        return "move axis"
    if any(_is_interleaved(piece) for piece in match.pieces):
        return "interleaved rows"
    if len({piece.target for piece in match.pieces}) > 1:
        return "split rows"
    if len(sources[first.target]) > 1:
        return "join rows"
    if len(match.pieces) > 1:
        return "reorder rows"
    return "copy" if match.tensor.entry.name == first.target else "rename"


def _is_interleaved(piece: Piece) -> bool:
    return piece.source_rows.groups > 1 or piece.target_rows.groups > 1


def _dtype(before: str, after: set[str]) -> str:
    changed = sorted(dtype for dtype in after if dtype != before)
    return f"{before} -> {', '.join(changed)}" if changed else before


def _dropped_rows(dropped: Sequence[Dropped]) -> list[Row]:
    groups: defaultdict[tuple[str, str], _Group] = defaultdict(_Group)
    for tensor in dropped:
        group = groups[tensor.rule, _dropped_pattern(tensor)]
        group.count += 1
        group.num_bytes += tensor.num_bytes
    return [
        Row(pattern, group.count, (), rule, "drop", "", False, group.num_bytes)
        for (rule, pattern), group in groups.items()
    ]


def _dropped_pattern(tensor: Dropped) -> str:
    segments = without_wrappers(tensor.source).split(".")
    for i, segment in enumerate(segments):
        if segment.startswith(_WHOLE_PARTS.get(tensor.rule, ("\0",))):
            return ".".join([*segments[: i + 1], "**"])
    return pattern_of(tensor.source)
