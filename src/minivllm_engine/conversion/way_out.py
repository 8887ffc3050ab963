"""One remedy for everything that is wrong with a plan: tried on the plan before it is told."""

from collections.abc import Iterable
from dataclasses import dataclass

from minivllm_engine.conversion.fixes import Fix, joined
from minivllm_engine.conversion.plan import Plan, Problem
from minivllm_engine.conversion.planning import replanned
from minivllm_engine.conversion.problems import counted
from minivllm_engine.conversion.remedies import ANOTHER_SOURCE
from minivllm_engine.core.errors import CheckpointError, ConversionError
from minivllm_engine.core.escape import escape, listed
from minivllm_engine.core.units import count_text

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
    left = {problem.name for problem in rest}
    needed = _in_few(map(_without_options, rest))
    mended = [problem.advice for problem in plan.problems if problem.name not in left]
    better = [text for text in _in_few(mended) if text not in needed] if fix.helps else []
    command = [fix.text(plan.options)] if fix.helps else []
    parts = [*needed, "; or ".join([" and ".join(better), *command] if better else command)]
    return WayOut(fix, " · ".join(filter(None, parts)))


def not_covered(plan: Plan) -> ConversionError:
    """The error for a plan with problems: their number by kind, the first of them, and the way out."""
    first = plan.problems[0]
    return ConversionError(
        f"{', '.join(counted(plan.problems))}; nothing written",
        why=f"{first.kind.replace('_', ' ')}: {escape(first.name)}"
        + (f": {first.detail}" if first.detail else "")
        + f"\n{reason(plan)}",
        hint=way_out(plan).text,
        code="not_covered",
    )


def _tried(plan: Plan) -> tuple[Fix, tuple[Problem, ...]]:
    """A fix that leaves nothing that options could mend, and what it leaves."""
    # What a line of the mapping has done may be all that is wrong.
    blamed = [problem.fix for problem in plan.problems if problem.lines]
    fix = joined(blamed or (problem.fix for problem in plan.problems))
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
    lines = dict.fromkeys(line for problem in plan.problems for line in problem.lines)
    if lines:
        shown = listed(map(repr, lines), _MOST_LINES)
        which = "this line" if len(lines) == 1 else f"these {len(lines):,} lines"
        return f"--mapping takes from the model what it needs, by {which}: {shown}"
    wrong = sum(p.count for p in plan.problems if p.kind == "wrong_shape")
    missing = sum(p.count for p in plan.problems if p.kind == "missing")
    parts = [
        f"{plan.num_used - wrong:,} of {count_text(len(plan.source.tensors), 'tensor')} in the source fit"
    ]
    if missing:
        parts.append(f"the model that {plan.source.config_file} describes has {missing:,} more")
    return f"{', and '.join(parts)}; a target is whole, and leaves nothing out that was not named"


def _without_options(problem: Problem) -> str:
    """What can be done where no option has been found that works."""
    if not problem.fix.helps or problem.advice:
        return problem.advice or problem.remedy
    return "--mapping FILE to say what the tensors are: a line for each that --dry-run lists"


def _in_few(advice: Iterable[str]) -> list[str]:
    """Each piece of advice once, and that about sources of what is missing in one."""
    found = list(dict.fromkeys(filter(None, advice)))
    sources = [text for text in found if text.startswith(ANOTHER_SOURCE)]
    if len(sources) > 1:
        first = found.index(sources[0])
        found = [text for text in found if text not in sources]
        found.insert(first, f"{ANOTHER_SOURCE}what is missing")
    return found
