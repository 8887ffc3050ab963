"""What can be done about a problem of a plan, as a command line takes it."""

import re
from dataclasses import replace

from minivllm_engine.checkpoint.mismatch import BEYOND
from minivllm_engine.checkpoint.names import EMBEDDING, HEAD
from minivllm_engine.conversion.fixes import Fix, glob_of
from minivllm_engine.conversion.options import ConvertOptions
from minivllm_engine.conversion.plan import Problem
from minivllm_engine.core.escape import escape

OTHER_CONFIG = "--model-config FILE with the config.json that was saved with these weights"
ANOTHER_SOURCE = "a source that holds "
_TIED = '"tie_word_embeddings": true in config.json, if the head is the embedding'
_IN_LAYER = re.compile(r"(\blayers\.[^.]+\.).+", re.DOTALL)


def left_out(problem: Problem) -> Fix:
    """What leaves out the tensors that a problem is about; of a layer too many all of them."""
    name = problem.name
    if problem.detail.startswith(BEYOND):
        name = _IN_LAYER.sub(r"\1*", name)
        return Fix(allow_unmatched=(glob_of(name, 2),))
    return Fix(allow_unmatched=(glob_of(name, problem.count),))


def with_advice(problem: Problem, advice: str, fix: Fix, options: ConvertOptions) -> Problem:
    """For what is better done in another way than by options."""
    word = "leave it out: " if fix.allow_unmatched else ""
    remedy = f"{advice}; or {word}{fix.text(options)}"
    return replace(problem, advice=advice, fix=fix, remedy=remedy)


def for_missing(problem: Problem, options: ConvertOptions) -> Problem:
    """Where nothing in the source could be meant."""
    fix = Fix(allow_missing=(problem.name,))
    advice = _TIED if problem.name == HEAD else ANOTHER_SOURCE + problem.name
    return with_advice(problem, advice, fix, options)


def for_two_sources(problem: Problem, fix: Fix, options: ConvertOptions) -> Problem:
    if not fix.helps:
        advice = f"leave all but one source of {escape(problem.name)} out with --mapping"
        return replace(problem, advice=advice, remedy=advice)
    word = "" if fix.without else "leave one of them out: "
    return replace(problem, fix=fix, remedy=word + fix.text(options))


def for_wrong_shape(target: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """
    Args:
        target: canonical name of what the tensor becomes.
        found, wanted: its shape, and that of the config.
    """
    if target in (EMBEDDING, HEAD) and len(found) == 2 and found[1:] == wanted[1:]:
        return f'"vocab_size": {found[0]} in config.json, or {OTHER_CONFIG}'
    if is_flat_convolution(target, found, wanted):
        return "save it as [channels, 1, kernel], with tensor.unsqueeze(1), from where it was [.., 1, ..]"
    return OTHER_CONFIG


def is_flat_convolution(target: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """A convolution [channels, kernel]: where its third dimension was would tell who wrote the norms."""
    return target.endswith("conv1d.weight") and found == (wanted[0], max(wanted[1:]))
