"""The way of one tensor through the rules."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from minivllm_engine.checkpoint.safetensors_header import TensorEntry
from minivllm_engine.conversion.naming import name_tensors
from minivllm_engine.conversion.plan import Piece, Plan, Rows, TargetTensor
from minivllm_engine.conversion.styles import find_rule
from minivllm_engine.conversion.targets import SHORT_DTYPES
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape, listed
from minivllm_engine.core.units import count_text


@dataclass(frozen=True, slots=True)
class Step:
    """One rule on the way. rule: "wrapper", "root", "rename", "style", "rows", "dtype", "shard" ...;
    text: what it did, such as "layers.0.attn.q_proj.weight -> rows 0:32 of ..."."""

    rule: str
    text: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """name: as in the file, or canonical. side: which of both it is ("source" or "target")."""

    name: str
    side: str
    steps: tuple[Step, ...]


def explain(plan: Plan, name: str) -> tuple[Explanation, ...]:
    """The rule chain of a source tensor, or where a target tensor comes from; a name that is both gives
    two explanations.

    Raises:
        CheckpointError: no tensor has this name; the nearest names are in its hint.
    """
    entries = {entry.name: entry for entry in plan.source.tensors}
    targets = {target.name: target for target in plan.targets}
    found = []
    if name in entries:
        found.append(Explanation(name, "source", tuple(_source_steps(plan, entries[name]))))
    if name in targets:
        found.append(Explanation(name, "target", tuple(_target_steps(plan, targets[name]))))
    if not found:
        close = difflib.get_close_matches(name, [*entries, *targets], n=3, cutoff=0.6)
        raise CheckpointError(
            f"no tensor is called {escape(name)}",
            why=f"{plan.source.path} holds {count_text(len(entries), 'tensor')}",
            hint=f"Nearest: {listed(dict.fromkeys(close))}"
            if close
            else "--dry-run lists all names.",
        )
    return tuple(found)


def _source_steps(plan: Plan, entry: TensorEntry) -> Iterator[Step]:
    shape = list(entry.shape)
    yield Step("source", f"{entry.name} {SHORT_DTYPES.get(entry.dtype, entry.dtype)} {shape}")
    named = name_tensors(plan.source.tensors, plan.options.renames)
    tensor = next(tensor for tensor in named if tensor.entry.name == entry.name)
    for step, after in tensor.steps:
        yield Step(step, after)
    dropped = next((d for d in plan.dropped if d.source == entry.name), None)
    if dropped:
        yield Step(dropped.rule, "dropped")
        return
    rule = find_rule(tensor, frozenset(plan.style))
    if rule is None:
        yield Step("unmatched", "no rule knows this name")
        return
    order = " | ".join(
        f"{', '.join(section.blocks)}" + (f" by {section.groups}" if section.groups else "")
        for section in rule.sections
    )
    yield Step(rule.name, f"{rule.tensor} holds {order}")
    targets = {target.name: target for target in plan.targets}
    for piece in plan.pieces:
        if piece.source == entry.name:
            yield from _piece_steps(piece, targets[piece.target], plan)


def _target_steps(plan: Plan, target: TargetTensor) -> Iterator[Step]:
    kept = " (kept whatever dtype is asked for)" if target.kept else ""
    yield Step("target", f"{target.name} {target.dtype} {list(target.shape)}{kept}")
    for piece in plan.pieces:
        if piece.target == target.name:
            text = f"{rows_text(piece.source_rows)} of {piece.source}"
            yield Step("rows", f"{rows_text(piece.target_rows)} <- {text}")
    yield Step("shard", _shard_of(plan, target.name))


def _piece_steps(piece: Piece, target: TargetTensor, plan: Plan) -> Iterator[Step]:
    source, rows = rows_text(piece.source_rows), rows_text(piece.target_rows)
    yield Step("rows", f"{source} -> {target.name} {rows}")
    if piece.transform != "copy":
        words = {
            "minus_one": "w - 1 in fp32",
            "conv_axis": "[channels, kernel, 1] moved to [.., 1, ..]",
        }
        yield Step("values", words[piece.transform])
    kept = ", kept whatever dtype is asked for" if target.kept else ""
    yield Step("dtype", f"{target.dtype}{kept}")
    yield Step("shard", _shard_of(plan, target.name))


def _shard_of(plan: Plan, target: str) -> str:
    return next(shard.name for shard in plan.shards if target in shard.tensors)


def rows_text(rows: Rows) -> str:
    """Rows in words: "rows 0:64", or "4 runs of 32 rows, every 64 from 0"."""
    if rows.groups == 1:
        return f"rows {rows.offset}:{rows.offset + rows.size}"
    return f"{rows.groups} runs of {rows.size} rows, every {rows.stride} from {rows.offset}"
