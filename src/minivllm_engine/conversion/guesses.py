"""What tensors of a source should have been called: guessed from names, shapes and what is missing."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from minivllm_engine.checkpoint.names import bare_name, skip_rule
from minivllm_engine.checkpoint.rules import CANONICAL, FOREIGN, TensorRule
from minivllm_engine.checkpoint.safetensors_header import FLOAT_TYPES
from minivllm_engine.conversion.fixes import Fix, source_pattern
from minivllm_engine.conversion.layouts import Layouts
from minivllm_engine.conversion.naming import NamedTensor
from minivllm_engine.conversion.patterns import placeholders
from minivllm_engine.conversion.problems import nearest, pattern_of
from minivllm_engine.conversion.styles import find_rule

KNOWN_NAMES = {
    f"layers.*.{rule.tensor}" if rule.in_layer else rule.tensor: rule
    for rule in (*FOREIGN, *CANONICAL)
}
# Patterns of names for which nearest ones are looked for: a source of noise is not worth more time.
MOST_PATTERNS, _MOST_PREFIXES = 200, 50
# Patterns of names that tell a prefix from a slip of the pen.
_LEAST_WITH_PREFIX = 2


class Guesses:
    """Lines of a mapping that would give each of some targets one source, by the nearest names.

    Args:
        groups: tensors that nothing is made of, by the pattern of their stored names.
        wanting: targets that lack rows.
    """

    def __init__(
        self,
        groups: Mapping[str, Sequence[NamedTensor]],
        wanting: Collection[str],
        layouts: Layouts,
    ) -> None:
        self._wanting, self._layouts = set(wanting), layouts
        self._lines: dict[str, tuple[str, str]] = {}
        self._by_target: dict[str, str] = {}
        for (prefix, target), count in Counter(_prefixes(groups)).most_common(_MOST_PREFIXES):
            if count >= _LEAST_WITH_PREFIX:
                self._take_prefix(prefix, target, groups)
        for _, pattern, known in sorted(self._candidates(groups)):
            self._take(pattern, known, groups[pattern])

    def line_of(self, pattern: str) -> tuple[str, str] | None:
        """The line for tensors of this pattern of stored names."""
        return self._lines.get(pattern)

    def line_for(self, target: str) -> tuple[str, str] | None:
        """The line for what `target` could be made from."""
        pattern = self._by_target.get(target)
        return None if pattern is None else self._lines[pattern]

    def _candidates(
        self, groups: Mapping[str, Sequence[NamedTensor]]
    ) -> Iterable[tuple[int, str, str]]:
        if not self._wanting:
            return
        for pattern in list(groups)[:MOST_PATTERNS]:
            tensor = groups[pattern][0]
            for name in dict.fromkeys((str(tensor.bare), str(bare_name(tensor.entry.name)))):
                for known, distance in nearest(pattern_of(name), list(KNOWN_NAMES)):
                    yield distance, pattern, known

    def _take_prefix(
        self, prefix: str, target: str, groups: Mapping[str, Sequence[NamedTensor]]
    ) -> None:
        """Names that are known but for their beginning, which some trainer has called otherwise.

        Args:
            target: what stands for names below `prefix`: "**", or "layers.**" for what follows a number.
        """
        below = [pattern for pattern in groups if pattern.startswith(f"{prefix}.")]
        if len(below) < _LEAST_WITH_PREFIX or source_pattern(prefix) != prefix or "*" in prefix:
            return
        found: defaultdict[str, list[str]] = defaultdict(list)
        taken: set[str] = set()
        for pattern in below:
            for tensor in groups[pattern]:
                rest = tensor.entry.name.removeprefix(f"{prefix}.")
                name = bare_name(target.replace("**", rest))
                rule = find_rule(replace(tensor, bare=name, dropped=None), self._layouts.styles)
                given = self._targets(rule, tensor, name.layer) if rule else []
                if not set(given) <= self._wanting - taken - set(self._by_target):
                    return
                taken |= set(given)
                found[pattern] += given
        known = {pattern: given for pattern, given in found.items() if given}
        if len(known) < _LEAST_WITH_PREFIX:
            return
        for pattern, given in known.items():
            self._lines[pattern] = f"{prefix}.**", target
            self._by_target |= dict.fromkeys(given, pattern)

    def _take(self, pattern: str, known: str, tensors: Sequence[NamedTensor]) -> None:
        if pattern in self._lines or placeholders(known) > placeholders(source_pattern(pattern)):
            return
        targets: list[str] = []
        for tensor in tensors:
            layer = tensor.bare.layer
            if layer is None:
                layer = bare_name(tensor.entry.name).layer
            given = self._targets(KNOWN_NAMES[known], tensor, layer)
            if not given or not set(given) <= self._wanting - set(self._by_target) - set(targets):
                return
            targets += given
        self._lines[pattern] = source_pattern(pattern), known
        self._by_target |= dict.fromkeys(targets, pattern)

    def _targets(self, rule: TensorRule, tensor: NamedTensor, layer: int | None) -> list[str]:
        """What `tensor` would become under `rule`, if it has the shape and type for it."""
        if rule.in_layer != (layer is not None):
            return []
        shape = self._layouts.source_shape(rule, layer)
        if shape != tensor.entry.shape or tensor.entry.dtype not in FLOAT_TYPES:
            return []
        names = (self._layouts.target_name(block, layer) for block in rule.blocks)
        return list(dict.fromkeys(names))


def _prefixes(groups: Iterable[str]) -> Iterable[tuple[str, str]]:
    """What names may begin with in the place of "model" or "layers", and what it stands for."""
    for pattern in groups:
        yield pattern.partition(".")[0], "**"
        before, number, _ = pattern.partition(".*.")
        if number:
            yield before, "layers.**"


class Blame:
    """Which lines of a mapping take from the model what it needs.

    Args:
        wanting: targets that lack rows.
        hurt: stored names of tensors that are in the wrong place.
    """

    def __init__(
        self,
        tensors: Iterable[NamedTensor],
        wanting: Collection[str],
        hurt: Collection[str],
        layouts: Layouts,
    ) -> None:
        self._line_of: dict[str, str] = {}
        self._drops: set[str] = set()
        own_lines: defaultdict[str, dict[str, str]] = defaultdict(dict)
        spoilt: set[str] = set()
        for tensor in tensors:
            line = tensor.renamed_by
            if line is None:
                continue
            if tensor.dropped == "rename":
                self._drops.add(line)
            targets = _own_targets(tensor, layouts)
            if not targets:
                spoilt.add(line)
                continue
            stored, own = tensor.entry.name, str(bare_name(tensor.entry.name))
            if stored in hurt or not targets.isdisjoint(wanting):
                own_lines[line][source_pattern(pattern_of(stored))] = pattern_of(own)
                self._line_of |= dict.fromkeys((*(targets & set(wanting)), stored), line)
        self._fixes = {
            # Where a line does some good too, those that it harms get one of their own before it.
            line: Fix(renames=tuple(own.items())) if line in spoilt else Fix(without=(line,))
            for line, own in own_lines.items()
        }

    def line(self, name: str) -> str | None:
        """The line that a target lacks its rows for, or that a stored tensor is misled by."""
        return self._line_of.get(name)

    def fix(self, name: str) -> Fix | None:
        line = self._line_of.get(name)
        return None if line is None else self._fixes[line]

    def drops(self, line: str) -> bool:
        return line in self._drops


def _own_targets(tensor: NamedTensor, layouts: Layouts) -> set[str]:
    """What a tensor would become by its own name, if it would."""
    own = bare_name(tensor.entry.name)
    if skip_rule(own):
        return set()
    rule = find_rule(replace(tensor, bare=own), layouts.styles)
    if rule is None or layouts.source_shape(rule, own.layer) != tensor.entry.shape:
        return set()
    return {layouts.target_name(block, own.layer) for block in rule.blocks}
