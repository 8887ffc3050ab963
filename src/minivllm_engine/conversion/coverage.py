"""The coverage rule: every source tensor has a place, and every row of a target one source."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from minivllm_engine.checkpoint.mismatch import is_beyond, layers_of
from minivllm_engine.checkpoint.names import HEAD, bare_name
from minivllm_engine.checkpoint.rules import TensorRule
from minivllm_engine.conversion import remedies
from minivllm_engine.conversion.conflicts import Conflicts, Run, gaps_of
from minivllm_engine.conversion.fixes import Fix, joined
from minivllm_engine.conversion.guesses import KNOWN_NAMES, MOST_PATTERNS, Blame, Guesses
from minivllm_engine.conversion.layouts import Layouts
from minivllm_engine.conversion.naming import NamedTensor
from minivllm_engine.conversion.options import ConvertOptions
from minivllm_engine.conversion.patterns import matches
from minivllm_engine.conversion.plan import Piece, Problem
from minivllm_engine.conversion.problems import filled_pattern, grouped, nearest, pattern_of
from minivllm_engine.core.escape import escape, listed


class Coverage:
    """What is wrong with a matching of tensors and targets, with what would mend it.

    Args:
        tensors: all of the source.
        pieces: what becomes of those that rules know.
        unmatched: those that none knows, with the reason where it is not the name.
        passed_over: those that `allow_unmatched` leaves out.
        misplaced: stored names of those with a shape, or in a layer, that their new name does not have.
        skipped: layers about which more has been said already.
        tied: the head is the embedding.
    """

    def __init__(
        self,
        tensors: Sequence[NamedTensor],
        pieces: Iterable[Piece],
        unmatched: Sequence[tuple[NamedTensor, str]],
        passed_over: Sequence[NamedTensor],
        misplaced: Iterable[str],
        layouts: Layouts,
        options: ConvertOptions,
        *,
        skipped: Iterable[int | None],
        tied: bool,
    ) -> None:
        self._layouts, self._options = layouts, options
        self._pieces: defaultdict[str, list[Piece]] = defaultdict(list)
        for piece in pieces:
            self._pieces[piece.target].append(piece)
        self._holes: dict[str, list[Run]] = {}
        self._shared: dict[str, list[str]] = {}
        self._find_gaps(tuple(f"model.layers.{layer}." for layer in skipped), tied)
        hurt = {*misplaced, *(name for given in self._shared.values() for name in given)}
        self._blame = Blame(tensors, self._holes, hurt, layouts)
        self._conflicts = Conflicts(self._shared, self._pieces, tensors)
        self._unmatched = {tensor.entry.name: (tensor, why) for tensor, why in unmatched}
        strays = [tensor for tensor, why in unmatched if not why]
        groups: defaultdict[str, list[NamedTensor]] = defaultdict(list)
        for tensor in (*strays, *passed_over):
            if self._blame.line(tensor.entry.name) is None:
                groups[pattern_of(tensor.entry.name)].append(tensor)
        self._guesses = Guesses(groups, self._holes, layouts)
        self._strays = [
            pattern_of(bare_name(group[0].entry.name).canonical)
            for group in list(groups.values())[:MOST_PATTERNS]
        ]

    def unmatched(self) -> list[Problem]:
        """Tensors that no rule knows."""
        named = [
            (name, why or self._misled(tensor)) for name, (tensor, why) in self._unmatched.items()
        ]
        return grouped("unmatched", named, near=self._near_unmatched, finish=self._finish_unmatched)

    def uncovered(self) -> list[Problem]:
        """Targets that two sources give, or none, or none wholly."""
        return [*self._two_sources(), *self._missing()]

    def blamed(self, problem: Problem, names: Iterable[str]) -> Problem | None:
        """The problem with what mends it, if a line of the mapping made it.

        Args:
            names: tensors of the source, or targets, that it is about.
        """
        lines = {line: name for name in names if (line := self._blame.line(name)) is not None}
        fixes = [fix for name in lines.values() if (fix := self._blame.fix(name)) is not None]
        if not fixes:
            return None
        fix = joined(fixes)
        remedy = fix.text(self._options)
        return replace(problem, fix=fix, remedy=remedy, advice="", lines=tuple(lines))

    def _find_gaps(self, skipped: tuple[str, ...], tied: bool) -> None:
        for name, shape in self._layouts.expected.items():
            if (tied and name == HEAD) or name.startswith(skipped or "\0"):
                continue
            holes, shared = gaps_of(self._pieces[name], shape[0])
            if shared:
                self._shared[name] = shared
            elif holes and (self._pieces[name] or not matches(name, self._options.allow_missing)):
                self._holes[name] = holes

    def _misled(self, tensor: NamedTensor) -> str:
        """Of a tensor that a mapping has renamed to what no rule knows either."""
        if tensor.renamed_by is None:
            return ""
        called = escape(pattern_of(tensor.bare.canonical))
        return f"--mapping calls it {called}, which no rule knows"

    def _near_unmatched(self, names: list[str]) -> tuple[tuple[str, int], ...]:
        tensor, why = self._unmatched[names[0]]
        return () if why else nearest(pattern_of(str(tensor.bare)), list(KNOWN_NAMES))

    def _finish_unmatched(self, problem: Problem, names: list[str]) -> Problem:
        pattern = pattern_of(names[0])
        blamed = self.blamed(problem, names)
        if blamed is not None:
            return blamed
        _, why = self._unmatched[names[0]]
        leave_out = remedies.left_out(problem)
        if why:
            return remedies.with_advice(problem, remedies.OTHER_CONFIG, leave_out, self._options)
        guessed = self._guesses.line_of(pattern)
        if guessed is None:
            text = f"--mapping FILE to say what it is; or leave it out: {leave_out.text(self._options)}"
            return replace(problem, fix=leave_out, remedy=text)
        line = Fix(renames=(guessed,))
        text = f"{line.text(self._options)}; or leave it out: {leave_out.text(self._options)}"
        return replace(problem, fix=line, remedy=text)

    def _two_sources(self) -> list[Problem]:
        groups: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
        for name, sources in self._shared.items():
            groups[pattern_of(name), *map(pattern_of, sources)].append(name)
        problems = []
        for (pattern, *_), names in groups.items():
            sources = [source for name in names for source in self._shared[name]]
            by_pattern: defaultdict[str, list[str]] = defaultdict(list)
            for source in dict.fromkeys(sources):
                by_pattern[pattern_of(source)].append(source)
            given = [filled_pattern(alike, some) for alike, some in by_pattern.items()]
            problem = Problem(
                "two_sources",
                filled_pattern(pattern, names),
                len(names),
                f"given by {listed(given)}"
                if len(given) != 2
                else f"given by {escape(given[0])} and by {escape(given[1])}",
            )
            problems.append(
                self.blamed(problem, sources)
                or remedies.for_two_sources(problem, self._conflicts.fix(sources), self._options)
            )
        return problems

    def _missing(self) -> list[Problem]:
        partial = [
            (name, f"rows {_spans(holes)} have no source")
            for name, holes in self._holes.items()
            if self._pieces[name]
        ]
        missing = [
            (name, self._why_missing(name)) for name in self._holes if not self._pieces[name]
        ]
        return [
            *grouped("missing", missing, near=self._near_missing, finish=self._finish_missing),
            *grouped("missing", partial, near=lambda _: (), finish=self._finish_partial),
        ]

    def _why_missing(self, name: str) -> str:
        line = self._blame.line(name)
        if line is not None:
            does = "drops it" if self._blame.drops(line) else "makes something else of it"
            return f"the line {escape(repr(line))} of --mapping {does}"
        if name == HEAD:
            return 'if the head is the embedding, config.json must say "tie_word_embeddings": true'
        return ""

    def _near_missing(self, names: list[str]) -> tuple[tuple[str, int], ...]:
        return () if self._why_missing(names[0]) else nearest(pattern_of(names[0]), self._strays)

    def _finish_missing(self, problem: Problem, names: list[str]) -> Problem:
        otherwise = self._given_otherwise(problem, names)
        return otherwise or remedies.for_missing(problem, self._options)

    def _finish_partial(self, problem: Problem, names: list[str]) -> Problem:
        otherwise = self._given_otherwise(problem, names)
        if otherwise is not None:
            return otherwise
        advice = f"a source that holds all parts of {escape(problem.name)}"
        return replace(problem, advice=advice, remedy=advice)

    def _given_otherwise(self, problem: Problem, names: list[str]) -> Problem | None:
        """The problem of targets that could have their rows from tensors that the source holds."""
        blamed = self.blamed(problem, names)
        if blamed is not None:
            return blamed
        found = dict.fromkeys(filter(None, map(self._guesses.line_for, names)))
        if not found:
            return None
        fix = Fix(renames=tuple(found))
        return replace(problem, fix=fix, remedy=fix.text(self._options))


def why_unmatched(rule: TensorRule | None, layer: int | None, layouts: Layouts) -> str:
    """What is wrong with a tensor, where it is not its name."""
    if is_beyond(layer, layouts.config):
        return layers_of(layouts.config)
    return "" if rule is None else "config.json has no such part"


def _spans(holes: list[Run]) -> str:
    shown = ", ".join(f"{start}:{stop}" for start, stop in holes[:3])
    return shown + (f" and {len(holes) - 3} more" if len(holes) > 3 else "")
