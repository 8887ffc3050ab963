"""The names of a source's tensors, followed through wrappers, roots, renames and run-time names."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from minivllm_engine.checkpoint.names import (
    BareName,
    skip_rule,
    split_layer,
    without_roots,
    without_wrappers,
)
from minivllm_engine.checkpoint.safetensors_header import TensorEntry
from minivllm_engine.conversion.patterns import as_regex, filled

# A mixer that holds one of these is a Gated DeltaNet.
_LINEAR_PARTS = re.compile(r"mixer\.(in_proj\w*|A_log|conv1d)(\..+)?")


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A source tensor and its name, step by step.

    Attributes:
        bare: the last name, without wrappers and roots.
        steps: (rule, name after it) of every rule that changed something.
        dropped: the rule that leaves it out, or None.
        renamed_by: pattern of the rename that matched, or None.
    """

    entry: TensorEntry
    bare: BareName
    steps: tuple[tuple[str, str], ...]
    dropped: str | None
    renamed_by: str | None = None


@dataclass(frozen=True, slots=True)
class _Rename:
    """as_stored: the pattern matches names of the file, and so is meant for these alone."""

    source: str
    expression: re.Pattern[str]
    target: str | None
    as_stored: bool

    def match(self, stored: str, bare: str) -> re.Match[str] | None:
        """Rename, or return None. stored: a name as in the file; bare: without wrappers and roots."""
        spellings = [stored]
        if not self.as_stored:
            spellings += [without_wrappers(stored), bare, split_layer(bare).canonical]
        found = (self.expression.fullmatch(spelling) for spelling in spellings)
        return next(filter(None, found), None)


def name_tensors(
    entries: Iterable[TensorEntry], renames: tuple[tuple[str, str | None], ...]
) -> list[NamedTensor]:
    """Follow every name. `renames`: see `ConvertOptions.renames`."""
    entries = list(entries)
    patterns = []
    for source, target in renames:
        expression = as_regex(source)
        as_stored = any(expression.fullmatch(entry.name) for entry in entries)
        patterns.append(_Rename(source, expression, target, as_stored))
    return _without_mixers([_named(entry, patterns) for entry in entries])


def _named(entry: TensorEntry, renames: list[_Rename]) -> NamedTensor:
    steps: list[tuple[str, str]] = []
    name = entry.name
    for rule, change in (("wrapper", without_wrappers), ("root", without_roots)):
        changed = change(name)
        if changed != name:
            steps.append((rule, changed))
            name = changed
    renamed_by = None
    for rename in renames:
        match = rename.match(entry.name, name)
        if match is None:
            continue
        if rename.target is None:
            return NamedTensor(entry, split_layer(name), tuple(steps), "rename", rename.source)
        name = without_roots(filled(rename.target, match.groups()))
        steps.append(("rename", name))
        renamed_by = rename.source
        break
    bare = split_layer(name)
    return NamedTensor(entry, bare, tuple(steps), skip_rule(bare), renamed_by)


def _without_mixers(named: list[NamedTensor]) -> list[NamedTensor]:
    """Run-time names: whether a layer's `mixer` is a DeltaNet or attention shows from what it holds."""
    parts: defaultdict[int | None, set[str]] = defaultdict(set)
    for tensor in named:
        if tensor.bare.tensor.startswith("mixer."):
            parts[tensor.bare.layer].add(tensor.bare.tensor)
    kinds = {
        layer: "linear_attn" if any(map(_LINEAR_PARTS.fullmatch, names)) else "self_attn"
        for layer, names in parts.items()
    }

    def resolved(tensor: NamedTensor) -> NamedTensor:
        if tensor.bare.layer is None or not tensor.bare.tensor.startswith("mixer."):
            return tensor
        name = kinds[tensor.bare.layer] + tensor.bare.tensor.removeprefix("mixer")
        bare = BareName(tensor.bare.layer, name)
        return replace(tensor, bare=bare, steps=(*tensor.steps, ("mixer", str(bare))))

    return [resolved(tensor) for tensor in named]
