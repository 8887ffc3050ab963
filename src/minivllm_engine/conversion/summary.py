"""A plan for people: the lines of its mapping table, and notes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from minivllm_engine.checkpoint.names import HEAD, without_wrappers
from minivllm_engine.conversion.layouts import Layouts
from minivllm_engine.conversion.matching import Match
from minivllm_engine.conversion.naming import NamedTensor
from minivllm_engine.conversion.options import ConvertOptions
from minivllm_engine.conversion.patterns import matches, pattern_of
from minivllm_engine.conversion.plan import SHORT_DTYPES, Dropped, Piece, Row, TargetTensor
from minivllm_engine.conversion.source import Source
from minivllm_engine.conversion.styles import FUSED_DELTANET
from minivllm_engine.core.escape import escape, listed
from minivllm_engine.core.units import count_text
from minivllm_engine.model_config.reader import unknown_model_type

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
    """Make the lines in the order of the model, what is dropped at the end."""
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
    """Say what is done to a source tensor. sources: target -> the tensors it is made of."""
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


def plan_notes(
    source: Source,
    named: list[NamedTensor],
    layouts: Layouts,
    options: ConvertOptions,
    missing: tuple[str, ...],
    *,
    head_differs: bool,
) -> list[str]:
    """List what should be known about a plan beside its table.

    Args:
        missing: targets that are left out, as allowed.
        head_differs: the head turned out not to be the embedding.
    """
    notes = []
    unknown = unknown_model_type(source.config)
    if unknown is not None and "qwen3_next" not in unknown:
        notes.append(
            f"{source.config_file}: model_type {escape(repr(unknown))} is not known; the keys are those "
            "of this family, and the weights are taken for one of it"
        )
    if head_differs:
        notes.append(
            f"{HEAD} differs from the embedding although {source.config_file} says "
            "tie_word_embeddings: both are kept, and the target is untied"
        )
    if not any(file.name == "tokenizer.json" for file in source.side_files):
        notes.append(
            f"{source.directory} has no tokenizer.json: copy the model's into the target to run it, "
            "with tokenizer_config.json, chat_template.jinja and generation_config.json"
        )
    notes += _unused(named, options, layouts)
    if missing:
        notes.append(
            f"without {count_text(len(missing), 'tensor')}, as --allow-missing says ({listed(missing, 2)}): "
            "the target is marked incomplete, and the engine will not load it"
        )
    return notes


def _unused(named: list[NamedTensor], options: ConvertOptions, layouts: Layouts) -> list[str]:
    """Options that decided nothing: often a slip of the pen."""
    names = {tensor.bare.tensor for tensor in named if not tensor.dropped}
    notes = []
    if options.qkvz_layout and not names & FUSED_DELTANET:
        notes.append(
            "qkvz_layout decides nothing here: no tensor is called in_proj_qkvz or in_proj_ba"
        )
    if options.q_gate_layout and not any("q_proj" in name or "qkv_proj" in name for name in names):
        notes.append("q_gate_layout decides nothing here: no layer has attention")
    for source, target in options.renames:
        if not any(tensor.renamed_by == source for tensor in named):
            what = "the drop of" if target is None else "the rename of"
            notes.append(f"{what} {escape(repr(source))} matches no tensor")
    held, wanted = [tensor.entry.name for tensor in named], list(layouts.expected)
    for word, globs, among in (
        ("allow_unmatched", options.allow_unmatched, held),
        ("allow_missing", options.allow_missing, wanted),
    ):
        notes += [
            f"{word} {escape(repr(glob))} matches no tensor"
            for glob in globs
            if not any(matches(name, [glob]) for name in among)
        ]
    return notes
