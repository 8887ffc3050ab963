"""Every source tensor matched with its rule."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from minivllm_engine.checkpoint.rules import PROTECTED, TensorRule
from minivllm_engine.conversion import remedies
from minivllm_engine.conversion.coverage import Coverage, why_unmatched
from minivllm_engine.conversion.layouts import Layouts
from minivllm_engine.conversion.naming import NamedTensor
from minivllm_engine.conversion.options import ConvertOptions
from minivllm_engine.conversion.patterns import matches
from minivllm_engine.conversion.plan import Dropped, Piece, Problem
from minivllm_engine.conversion.problems import grouped
from minivllm_engine.conversion.styles import find_rule
from minivllm_engine.core.escape import escape


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
    unmatched: list[tuple[NamedTensor, str]] = []
    passed_over: list[NamedTensor] = []
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
                passed_over.append(tensor)
            elif rule is None or layer not in wrong_layers:
                unmatched.append((tensor, why_unmatched(rule, layer, layouts)))
            continue
        if entry.shape != shape:
            target = layouts.target_name(rule.blocks[0], layer)
            misshapen.append((entry.name, target, entry.shape, shape))
        found.append(Match(tensor, rule, tuple(layouts.pieces(rule, entry.name, layer))))
    coverage = Coverage(
        tensors,
        (piece for match in found for piece in match.pieces),
        unmatched,
        passed_over,
        [
            *(name for name, *_ in misshapen),
            *(t.entry.name for t in tensors if t.bare.layer in wrong_layers),
        ],
        layouts,
        options,
        skipped=wrong_layers,
        tied=tied,
    )
    problems = (
        *_layers_with_blame(wrong_layers, tensors, coverage),
        *coverage.unmatched(),
        *_wrong_shapes(misshapen, coverage),
        *coverage.uncovered(),
    )
    return Matching(tuple(found), tuple(dropped), problems)


def is_protected(rule: TensorRule) -> bool:
    return any(block in PROTECTED for block in rule.blocks)


def _wrong_shapes(
    found: Iterable[tuple[str, str, tuple[int, ...], tuple[int, ...]]], coverage: Coverage
) -> list[Problem]:
    """Of (name, first target, shape, shape that the config asks for) of each such tensor."""
    by_remedy: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, target, shape, wanted in found:
        detail = f"is {escape(list(shape))}, config.json asks for {list(wanted)}"
        if remedies.is_flat_convolution(target, shape, wanted):
            detail += ": where the third dimension was would tell how norms are stored"
        by_remedy[remedies.for_wrong_shape(target, shape, wanted)].append((name, detail))

    def finish(problem: Problem, names: list[str], remedy: str) -> Problem:
        return coverage.blamed(problem, names) or replace(problem, advice=remedy, remedy=remedy)

    return [
        problem
        for remedy, named in by_remedy.items()
        for problem in grouped("wrong_shape", named, finish=partial(finish, remedy=remedy))
    ]


def _layers_with_blame(
    wrong: Mapping[int | None, Problem], tensors: Sequence[NamedTensor], coverage: Coverage
) -> list[Problem]:
    """The problems of `wrong` layers; a mapping may have moved there what is not theirs."""
    return [
        coverage.blamed(problem, [t.entry.name for t in tensors if t.bare.layer == layer])
        or problem
        for layer, problem in wrong.items()
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
            remedy = f"{remedies.OTHER_CONFIG}, or correct its layer_types"
            problems[layer] = Problem(
                "layers",
                f"model.layers.{layer}",
                detail=f"holds {words}, config.json says {_KIND_WORDS[wanted]}",
                remedy=remedy,
                advice=remedy,
            )
    return problems


_KIND_WORDS = {"linear": "linear_attention", "attention": "full_attention"}
