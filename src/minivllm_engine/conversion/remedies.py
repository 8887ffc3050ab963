"""What can be done about a problem of a plan, as a command line takes it."""

import json
import re
import shlex
from collections.abc import Collection

from minivllm_engine.checkpoint_mismatch import BEYOND
from minivllm_engine.checkpoint_names import EMBEDDING, HEAD
from minivllm_engine.conversion.patterns import placeholders
from minivllm_engine.conversion.plan import Problem
from minivllm_engine.conversion.problems import pattern_of
from minivllm_engine.printable import printable

OTHER_CONFIG = "--model-config FILE with the config.json that was saved with these weights"
# Of a key that stands before a colon on its line, by the rules of YAML.
_LONGEST_KEY = 1000
_IN_LAYER = re.compile(r"(\blayers\.[^.]+\.).+", re.DOTALL)
_PLAIN = re.compile(r"[A-Za-z_][\w.*\-]*")


def for_unmatched(problem: Problem, lacking: Collection[str]) -> str:
    """lacking: those of the nearest names whose targets have no source yet."""
    # Of a layer too many all is left out.
    name = problem.name
    if problem.detail.startswith(BEYOND):
        name = _IN_LAYER.sub(r"\1*", name)
    leave_out = f"leave it out: {option('--allow-unmatched', name)}"
    if problem.detail:
        return f"{OTHER_CONFIG}; or {leave_out}"
    source = pattern_of(problem.name)
    for nearest, _ in problem.nearest:
        if nearest in lacking and placeholders(nearest) <= placeholders(source):
            return f"{mapping_line(source, nearest)}; or {leave_out}"
    return f"--mapping FILE to say what it is; or {leave_out}"


def for_missing(problem: Problem) -> str:
    """The nearest names are those of sources without a rule."""
    target = pattern_of(problem.name)
    for nearest, _ in problem.nearest:
        if placeholders(target) <= placeholders(nearest):
            return mapping_line(nearest, target)
    if problem.name == HEAD:
        return '"tie_word_embeddings": true in config.json, if the head is the embedding'
    return (
        f"a source that holds {problem.name}; {option('--allow-missing', problem.name)} makes an "
        "incomplete target, which no engine loads"
    )


def for_two_sources(source: str) -> str:
    """source: name in the file of one of both."""
    return f"leave one of them out: {mapping_line(source, None)}"


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


def mapping_line(source: str, target: str | None) -> str:
    """What a mapping file needs, ready to be copied into it."""
    left, right = _scalar(source), "null" if target is None else _scalar(target)
    if max(len(left), len(right)) > _LONGEST_KEY:
        return "--mapping FILE with a line for its name, which --dry-run --json shows in full"
    return f"--mapping FILE with the line {left}: {right}"


def option(flag: str, name: str) -> str:
    """`flag` with a name or pattern for a shell; a name that cannot be printed is for the user to match."""
    return f"{flag} {shlex.quote(name) if printable(name) == name else 'GLOB'}"


def _scalar(name: str) -> str:
    """A name as YAML has it, on one line whatever is in it."""
    return name if _PLAIN.fullmatch(name) else json.dumps(name)
