"""One remedy for everything that is wrong with a plan: tried on the plan before it is told."""

from collections.abc import Iterable
from dataclasses import dataclass

from minivllm_engine.conversion.coverage import BY_A_LINE
from minivllm_engine.conversion.fixes import Fix, joined
from minivllm_engine.conversion.plan import Plan, Problem
from minivllm_engine.conversion.planning import replanned
from minivllm_engine.conversion.problems import counted
from minivllm_engine.conversion.remedies import ANOTHER_SOURCE
from minivllm_engine.errors import CheckpointError, ConversionError
from minivllm_engine.printable import printable

# A fix may bring to light what another one mends; more than twice it is no way out.
_ROUNDS = 4
# Lines of a mapping that an error names.
_MOST_LINES = 3


@dataclass(frozen=True, slots=True)
class WayOut:
    """What can be done about all problems of a plan at once.

    Attributes:
        fix: changes of options, which have been tried: they leave no problem but those that no option
            mends.
        text: the same in words, after what options cannot do or what is better.
    """

    fix: Fix
    text: str


def way_out(plan: Plan) -> WayOut:
    """The remedy for a plan with problems."""
    fix, rest = _tried(plan)
    if len(plan.problems) == 1 and not rest:
        return WayOut(fix, plan.problems[0].remedy)
    needed = list(dict.fromkeys(problem.advice or problem.remedy for problem in rest))
    mended = [problem for problem in plan.problems if problem.advice not in needed]
    better = _better(mended) if fix.helps else []
    command = [fix.text(plan.options)] if fix.helps else []
    parts = [*needed, "; or ".join([" and ".join(better), *command] if better else command)]
    return WayOut(fix, " · ".join(filter(None, parts)))


def not_covered(plan: Plan) -> ConversionError:
    """The error for a plan with problems: their number by kind, the first of them, and the way out."""
    first = plan.problems[0]
    return ConversionError(
        f"{', '.join(counted(plan.problems))}; nothing written",
        why=f"{first.kind.replace('_', ' ')}: {printable(first.name)}"
        + (f": {first.detail}" if first.detail else "")
        + f"\n{reason(plan)}",
        hint=way_out(plan).text,
        code="not_covered",
    )


def _tried(plan: Plan) -> tuple[Fix, tuple[Problem, ...]]:
    """A fix that leaves nothing that options could mend, and what it leaves."""
    fix = joined(problem.fix for problem in plan.problems)
    for _ in range(_ROUNDS):
        rest = _left_by(fix, plan)
        if rest is None:
            break
        more = joined((fix, *(problem.fix for problem in rest)))
        if more == fix:
            if any(problem.fix.helps for problem in rest):
                break
            return fix, rest
        fix = more
    # What is mended in one place breaks in another: what is left is to do without.
    fix = Fix(allow_unmatched=("*",), allow_missing=("*",))
    rest = _left_by(fix, plan)
    if rest is None or any(problem.fix.helps for problem in rest):
        return Fix(), plan.problems
    return fix, rest


def _left_by(fix: Fix, plan: Plan) -> tuple[Problem, ...] | None:
    """The problems of the plan with `fix`; None where it cannot be made at all."""
    try:
        return replanned(plan, fix.applied(plan.options)).problems
    except CheckpointError:
        return None


def reason(plan: Plan) -> str:
    """Why a plan with problems is not carried out, beyond what its problems say."""
    lines = dict.fromkeys(p.detail for p in plan.problems if p.detail.startswith(BY_A_LINE))
    if lines:
        counts = {line: sum(p.count for p in plan.problems if p.detail == line) for line in lines}
        told = [f"{line} ({count:,} tensors)" for line, count in counts.items()]
        return "what the model needs is taken from it: " + "; ".join(told[:_MOST_LINES])
    return (
        f"each of the {len(plan.source.tensors):,} tensors of the source needs one place, and each that "
        f"the model has needs one source; {plan.num_used:,} have both"
    )


def _better(mended: Iterable[Problem]) -> list[str]:
    """What is better than options, about problems that they could mend."""
    advice = list(dict.fromkeys(problem.advice for problem in mended if problem.advice))
    sources = [text for text in advice if text.startswith(ANOTHER_SOURCE)]
    if len(sources) > 1:
        first = advice.index(sources[0])
        advice = [text for text in advice if text not in sources]
        advice.insert(first, f"{ANOTHER_SOURCE}what is missing")
    return advice
