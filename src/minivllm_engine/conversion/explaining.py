"""A plan in words: the way of one tensor through the rules, and what can be done about its problems."""

import difflib
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from minivllm_engine.checkpoint.safetensors_header import TensorEntry
from minivllm_engine.conversion.naming import name_tensors
from minivllm_engine.conversion.options import Renames
from minivllm_engine.conversion.patterns import glob_of
from minivllm_engine.conversion.plan import SHORT_DTYPES, Piece, Plan, Problem, Rows, TargetTensor
from minivllm_engine.conversion.planning import replanned
from minivllm_engine.conversion.problems import counted, counts_of
from minivllm_engine.conversion.styles import find_rule
from minivllm_engine.core.errors import CheckpointError, ConversionError
from minivllm_engine.core.escape import escape, listed
from minivllm_engine.core.units import count_text

# Globs that anybody would copy from a message.
_MOST_GLOBS = 4
_PLAIN = re.compile(r"[A-Za-z_][\w.*\-]*", re.ASCII)
_YAML_WORDS = frozenset(("null", "true", "false", "yes", "no", "on", "off", "y", "n"))


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
    """Explain a source tensor's chain of rules, or where a target tensor comes from; a name that is
    both gives two explanations.

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
    """Write rows in words: "rows 0:64", or "4 runs of 32 rows, every 64 from 0"."""
    if rows.groups == 1:
        return f"rows {rows.offset}:{rows.offset + rows.size}"
    return f"{rows.groups} runs of {rows.size} rows, every {rows.stride} from {rows.offset}"


@dataclass(frozen=True, slots=True)
class Proposal:
    """What can be done about a plan with problems.

    Attributes:
        text: for people.
        mapping: the whole mapping to use, which was tried; None where no line of one helps for certain.
    """

    text: str
    mapping: Renames | None = None


def proposal(plan: Plan) -> Proposal:
    """Propose one line of a mapping that mends something and harms nothing, or else advice by kind."""
    before, best, least = counts_of(plan.problems), None, plan.problems
    for candidate in plan.candidates:
        try:
            after = replanned(plan, replace(plan.options, renames=candidate)).problems
        except CheckpointError:
            continue
        counts = counts_of(after)
        better = counts.total() < counts_of(least).total()
        if better and all(counts[kind] <= before[kind] for kind in counts):
            best, least = candidate, after
    if best is not None:
        more = f" ({', '.join(counted(least))} then)" if least else ""
        return Proposal(_line_text(plan.options.renames, best) + more, best)
    by_kind: dict[str, Problem] = {}
    for problem in plan.problems:
        by_kind.setdefault(problem.kind, problem)
    unmatched = [problem for problem in plan.problems if problem.kind == "unmatched"]
    if len(unmatched) > 1 and "--allow-unmatched" in unmatched[0].remedy:
        remedy = (
            "--mapping FILE with lines that say what they are; or, if it is the same without them:"
        )
        globs = [shlex.quote(glob_of(p.name, p.count)) for p in unmatched[:_MOST_GLOBS]]
        flags = " ".join(f"--allow-unmatched {glob}" for glob in globs)
        too_many = len(unmatched) > _MOST_GLOBS
        remedy += " --allow-unmatched GLOB for each" if too_many else f" {flags}"
        by_kind["unmatched"] = replace(unmatched[0], remedy=remedy)
    return Proposal(" · ".join(dict.fromkeys(problem.remedy for problem in by_kind.values())))


def not_covered(plan: Plan) -> ConversionError:
    """Make the error for a plan with problems: their number by kind, the first of them, and a way out."""
    first = plan.problems[0]
    detail = f": {first.detail}" if first.detail else ""
    return ConversionError(
        f"{', '.join(counted(plan.problems))}; nothing written",
        why=f"{first.kind.replace('_', ' ')}: {escape(first.name)}{detail}\n{reason(plan)}",
        hint=proposal(plan).text,
        code="not_covered",
    )


def reason(plan: Plan) -> str:
    """Say why a plan with problems is not carried out, beyond what its problems say."""
    counts = counts_of(plan.problems)
    tensors = count_text(len(plan.source.tensors), "tensor")
    text = f"{plan.num_used - counts['wrong_shape']:,} of {tensors} in the source fit"
    if counts["missing"]:
        text += f", and the model that {plan.source.config_file} describes has {counts['missing']:,} more"
    return f"{text}; a target is whole, and leaves nothing out that was not named"


def _line_text(before: Renames, after: Renames) -> str:
    """What is to be typed, given the mapping so far."""
    if len(after) < len(before):
        (gone,) = [pair for pair in before if pair not in after]
        return f"leave the line {escape(repr(gone[0]))} out of --mapping"
    source, target = after[0]
    line = f"{_scalar(source)}: {'null' if target is None else _scalar(target)}"
    where = (
        "the --mapping FILE, with this line before the others"
        if before
        else "--mapping FILE with the line"
    )
    return f"{where}: {line}" if before else f"{where} {line}"


def _scalar(name: str) -> str:
    """A name as YAML has it, on one line whatever is in it."""
    plain = _PLAIN.fullmatch(name) and name.lower() not in _YAML_WORDS
    return name if plain else json.dumps(name)
