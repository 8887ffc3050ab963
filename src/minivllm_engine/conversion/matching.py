"""Every source tensor matched with its rule, and every target with its sources: the coverage rule."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from minivllm_engine.checkpoint_mismatch import is_beyond, layers_of
from minivllm_engine.checkpoint_names import HEAD, bare_name
from minivllm_engine.checkpoint_rules import CANONICAL, FOREIGN, PROTECTED, TensorRule
from minivllm_engine.conversion import remedies
from minivllm_engine.conversion.layouts import Layouts
from minivllm_engine.conversion.naming import NamedTensor
from minivllm_engine.conversion.options import ConvertOptions
from minivllm_engine.conversion.patterns import matches
from minivllm_engine.conversion.plan import Dropped, Piece, Problem
from minivllm_engine.conversion.problems import grouped, pattern_of
from minivllm_engine.conversion.styles import find_rule
from minivllm_engine.printable import printable

_KNOWN_NAMES = {
    f"layers.*.{rule.tensor}" if rule.in_layer else rule.tensor: rule
    for rule in (*FOREIGN, *CANONICAL)
}


@dataclass(frozen=True, slots=True)
class Match:
    """A source tensor, the rule that knows it, and what becomes of it."""

    tensor: NamedTensor
    rule: TensorRule
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Matching:
    """All source tensors: matched, dropped, or a problem. Targets without a source are problems too."""

    matches: tuple[Match, ...]
    dropped: tuple[Dropped, ...]
    problems: tuple[Problem, ...]


def match_tensors(
    tensors: list[NamedTensor], layouts: Layouts, options: ConvertOptions, *, tied: bool
) -> Matching:
    """Apply the rules to every tensor.

    Args:
        tied: the head is the embedding; one in the source is dropped.
    """
    found: list[Match] = []
    dropped: list[Dropped] = []
    unmatched: list[tuple[str, str]] = []
    misshapen: list[tuple[str, str, tuple[int, ...], tuple[int, ...]]] = []
    wrong_layers = _layer_problems(tensors, layouts)
    for tensor in tensors:
        entry, layer = tensor.entry, tensor.bare.layer
        rule = find_rule(tensor, layouts.styles)
        if tensor.dropped or (tied and rule and rule.blocks == ("head",)):
            dropped.append(Dropped(entry.name, tensor.dropped or "tied-head", entry.num_bytes))
            continue
        shape = layouts.source_shape(rule, layer) if rule else None
        if rule is None or shape is None:
            if matches(entry.name, options.allow_unmatched):
                dropped.append(Dropped(entry.name, "allow-unmatched", entry.num_bytes))
            elif rule is None or layer not in wrong_layers:
                unmatched.append((entry.name, _why_unmatched(rule, layer, layouts)))
            continue
        if entry.shape != shape:
            target = layouts.target_name(rule.blocks[0], layer)
            misshapen.append((entry.name, target, entry.shape, shape))
        found.append(Match(tensor, rule, tuple(layouts.pieces(rule, entry.name, layer))))
    uncovered = _uncovered(found, layouts, options, tied, set(wrong_layers), unmatched)
    problems = [*wrong_layers.values()]
    problems += grouped(
        "unmatched",
        unmatched,
        nearest_in=list(_KNOWN_NAMES),
        look_up=lambda name: pattern_of(str(bare_name(name))),
        remedy=lambda problem: remedies.for_unmatched(problem, _lacking(uncovered, layouts)),
    )
    problems += _wrong_shapes(misshapen)
    problems += uncovered
    return Matching(tuple(found), tuple(dropped), tuple(problems))


def is_protected(rule: TensorRule) -> bool:
    return any(block in PROTECTED for block in rule.blocks)


def _why_unmatched(rule: TensorRule | None, layer: int | None, layouts: Layouts) -> str:
    if is_beyond(layer, layouts.config):
        return layers_of(layouts.config)
    return "" if rule is None else "config.json has no such part"


def _wrong_shapes(
    found: Iterable[tuple[str, str, tuple[int, ...], tuple[int, ...]]],
) -> list[Problem]:
    """Of (name, first target, shape, shape that the config asks for) of each such tensor."""
    by_remedy: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, target, shape, wanted in found:
        detail = f"is {printable(list(shape))}, config.json asks for {list(wanted)}"
        if remedies.is_flat_convolution(target, shape, wanted):
            detail += ": where the third dimension was would tell how norms are stored"
        by_remedy[remedies.for_wrong_shape(target, shape, wanted)].append((name, detail))
    return [
        problem
        for remedy, named in by_remedy.items()
        for problem in grouped("wrong_shape", named, remedy=lambda _, text=remedy: text)  # type: ignore[misc]
    ]


def _layer_problems(tensors: list[NamedTensor], layouts: Layouts) -> dict[int | None, Problem]:
    """Layers that hold the other kind of mixer than config.json says."""
    kinds: defaultdict[int, set[str]] = defaultdict(set)
    for tensor in tensors:
        rule = None if tensor.dropped else find_rule(tensor, layouts.styles)
        if rule and tensor.bare.layer is not None:
            kinds[tensor.bare.layer] |= {block.split(".")[0] for block in rule.blocks}
    problems: dict[int | None, Problem] = {}
    for layer in range(layouts.config.num_hidden_layers):
        held = sorted(kinds[layer] & {"linear", "attention"})
        wanted = "attention" if layouts.config.is_attention(layer) else "linear"
        if held and held != [wanted]:
            words = " and ".join(_KIND_WORDS[kind] for kind in held)
            problems[layer] = Problem(
                "layers",
                f"model.layers.{layer}",
                detail=f"holds {words}, config.json says {_KIND_WORDS[wanted]}",
                remedy=f"{remedies.OTHER_CONFIG}, or correct its layer_types",
            )
    return problems


_KIND_WORDS = {"linear": "linear_attention", "attention": "full_attention"}


def _uncovered(
    found: list[Match],
    layouts: Layouts,
    options: ConvertOptions,
    tied: bool,
    wrong_layers: set[int | None],
    unmatched: list[tuple[str, str]],
) -> list[Problem]:
    """Targets that no source gives, or not wholly, or that two give."""
    pieces: defaultdict[str, list[Piece]] = defaultdict(list)
    for match in found:
        for piece in match.pieces:
            pieces[piece.target].append(piece)
    missing: list[tuple[str, str]] = []
    partial: list[tuple[str, str]] = []
    twice: list[Problem] = []
    skipped = tuple(f"model.layers.{layer}." for layer in wrong_layers)
    for name, shape in layouts.expected.items():
        if (tied and name == HEAD) or name.startswith(skipped or "\0"):
            continue
        holes, overlaps = _gaps(pieces[name], shape[0])
        if overlaps:
            detail = f"given by {' and by '.join(map(printable, overlaps))}"
            remedy = remedies.for_two_sources(overlaps[-1])
            twice.append(Problem("two_sources", name, detail=detail, remedy=remedy))
        elif holes and pieces[name]:
            partial.append((name, f"rows {_spans(holes)} have no source"))
        elif holes and not matches(name, options.allow_missing):
            missing.append((name, _why_missing(name)))
    strays = [pattern_of(bare_name(name).canonical) for name, detail in unmatched if not detail]
    return [
        *twice,
        *grouped("missing", missing, nearest_in=strays, remedy=remedies.for_missing),
        *grouped("missing", partial, remedy=lambda _: "a source that holds all of its parts"),
    ]


def _lacking(uncovered: list[Problem], layouts: Layouts) -> set[str]:
    """Known names of tensors that would give something of a target without a source."""
    without = {pattern_of(p.name) for p in uncovered if p.kind == "missing"}
    without = {re.sub(r"\{[^}]*\}", "*", pattern) for pattern in without}
    return {
        name
        for name, rule in _KNOWN_NAMES.items()
        for block in rule.blocks
        if pattern_of(layouts.target_name(block, 0 if rule.in_layer else None)) in without
    }


def _why_missing(name: str) -> str:
    if name == HEAD:
        return 'if the head is the embedding, config.json must say "tie_word_embeddings": true'
    return ""


def _gaps(pieces: list[Piece], rows: int) -> tuple[list[tuple[int, int]], list[str]]:
    """Rows of a target that no piece gives, and the sources of which two give the same row."""
    runs = sorted((run, piece.source) for piece in pieces for run in piece.target_rows.runs())
    holes: list[tuple[int, int]] = []
    end, last = 0, ""
    for (start, stop), source in runs:
        if start < end:
            return [], [last, source]
        if start > end:
            holes.append((end, start))
        end, last = stop, source
    if end < rows:
        holes.append((end, rows))
    return holes, []


def _spans(holes: list[tuple[int, int]]) -> str:
    shown = ", ".join(f"{start}:{stop}" for start, stop in holes[:3])
    return shown + (f" and {len(holes) - 3} more" if len(holes) > 3 else "")
