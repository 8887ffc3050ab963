"""Every source tensor matched with its rule, and its number type checked."""

from dataclasses import dataclass

from minivllm_engine.checkpoint.rules import PROTECTED, TensorRule
from minivllm_engine.checkpoint.safetensors_header import FLOAT_TYPES
from minivllm_engine.conversion.layouts import Layouts
from minivllm_engine.conversion.naming import NamedTensor
from minivllm_engine.conversion.options import ConvertOptions, Renames
from minivllm_engine.conversion.patterns import matches
from minivllm_engine.conversion.plan import Dropped, Piece, Problem
from minivllm_engine.conversion.problems import (
    Outcome,
    find_problems,
    layer_problems,
    why_unmatched,
)
from minivllm_engine.conversion.source import Source
from minivllm_engine.conversion.styles import find_rule
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape, listed
from minivllm_engine.core.units import count_text


@dataclass(frozen=True, slots=True)
class Match:
    """A source tensor, the rule that knows it, and what becomes of it."""

    tensor: NamedTensor
    rule: TensorRule
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Matching:
    """All source tensors: matched, dropped, or a problem. Targets without a source are problems too.

    Attributes:
        candidates: see `Plan`.
    """

    matches: tuple[Match, ...]
    dropped: tuple[Dropped, ...]
    problems: tuple[Problem, ...]
    candidates: tuple[Renames, ...]


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
    wrong_layers = layer_problems(tensors, layouts)
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
    outcome = Outcome(
        tensors=tensors,
        pieces=[piece for match in found for piece in match.pieces],
        unmatched=unmatched,
        passed_over=passed_over,
        misshapen=misshapen,
        wrong_layers=wrong_layers,
        tied=tied,
    )
    problems, candidates = find_problems(outcome, layouts, options)
    return Matching(tuple(found), tuple(dropped), problems, candidates)


def is_protected(rule: TensorRule) -> bool:
    return any(block in PROTECTED for block in rule.blocks)


_QUANTISED = ("F8", "F6", "F4", "I8", "U8", "I4", "U4")


def check_types(source: Source, matching: Matching) -> None:
    """Check that every tensor of which something is read is of floats.

    Raises:
        CheckpointError: some are not; says what they are, and what can be done.
    """
    heads = {tensor.source for tensor in matching.dropped if tensor.rule == "tied-head"}
    read = heads | {match.tensor.entry.name for match in matching.matches}
    wrong = [e for e in source.tensors if e.name in read and e.dtype not in FLOAT_TYPES]
    if not wrong:
        return
    tensors = count_text(len(wrong), "tensor")
    what, remedy = _kind_of(wrong[0].dtype)
    raise CheckpointError(
        f"{wrong[0].file} holds {tensors} of type {listed(sorted({e.dtype for e in wrong}))}",
        why=f"such as {escape(wrong[0].name)}: {what}; only {', '.join(FLOAT_TYPES)} can be converted",
        hint=remedy,
    )


def _kind_of(dtype: str) -> tuple[str, str]:
    """(what a tensor of this type is, what can be done)."""
    if dtype.upper().startswith(_QUANTISED):
        return (
            "quantised, by its type",
            "Dequantise it first, or use the checkpoint that it was made from.",
        )
    if dtype == "BOOL":
        return "true and false, a mask and no weight", "Save the weight itself under this name."
    if dtype.startswith(("C", "complex")):
        return "complex numbers, of which this family has none", "Save it in real floats."
    kind = "whole numbers" if dtype.startswith(("I", "U")) else "an unknown type"
    return kind, "Save it in floats: tensor.float()."
