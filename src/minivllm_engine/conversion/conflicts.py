"""Source tensors that give the same rows of a target, and which of them can be left out."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from minivllm_engine.conversion.fixes import Fix, source_pattern
from minivllm_engine.conversion.naming import NamedTensor
from minivllm_engine.conversion.plan import Piece
from minivllm_engine.conversion.problems import filled_pattern, pattern_of

Run = tuple[int, int]

# Patterns of names that one line for their first segment is shorter than.
_LEAST_IN_ONE = 3


def gaps_of(pieces: Iterable[Piece], rows: int) -> tuple[list[Run], list[str]]:
    """Rows of a target that no piece gives, and all sources of rows that two give, in their order."""
    runs = sorted((run, piece.source) for piece in pieces for run in piece.target_rows.runs())
    holes: list[Run] = []
    shared: dict[str, None] = {}
    end, last = 0, ""
    for (start, stop), source in runs:
        if start < end:
            shared |= dict.fromkeys((last, source))
        if start > end:
            holes.append((end, start))
        if stop > end:
            end, last = stop, source
    if end < rows:
        holes.append((end, rows))
    return holes, list(shared)


class Conflicts:
    """What to leave out so that no row is given twice and none is lost.

    Args:
        shared: target -> its sources that give the same rows.
        pieces: target -> all that is written to it.
        tensors: all tensors of the source.
    """

    def __init__(
        self,
        shared: Mapping[str, Sequence[str]],
        pieces: Mapping[str, Sequence[Piece]],
        tensors: Sequence[NamedTensor],
    ) -> None:
        self._pieces = pieces
        self._tensors = {tensor.entry.name: tensor for tensor in tensors}
        self._by_pattern: defaultdict[str, list[str]] = defaultdict(list)
        if shared:
            for name in self._tensors:
                self._by_pattern[pattern_of(name)].append(name)
        self._targets: defaultdict[str, set[str]] = defaultdict(set)
        for target, written in pieces.items():
            for piece in written:
                self._targets[piece.source].add(target)
        self._left_out: set[str] = set()
        position = {name: i for i, name in enumerate(self._tensors)}
        sources = {source for given in shared.values() for source in given}
        for source in sorted(sources, key=lambda name: (self._worth(name), -position[name])):
            if self._is_spare(source):
                self._left_out.add(source)
        self._prefixes = self._left_out_whole()

    def fix(self, sources: Iterable[str]) -> Fix:
        """Lines that drop those of `sources` that can be left out, and nothing else."""
        lines: dict[str, None] = {}
        for pattern in dict.fromkeys(pattern_of(name) for name in sources):
            alike = self._by_pattern[pattern]
            names = [name for name in alike if name in self._left_out]
            if not names:
                continue
            prefix = names[0].partition(".")[0]
            if prefix in self._prefixes:
                lines[f"{prefix}.**"] = None
                continue
            exact = pattern if len(names) == len(alike) else filled_pattern(pattern, names)
            lines[source_pattern(exact)] = None
        return Fix(renames=tuple(lines.items()))

    def _left_out_whole(self) -> set[str]:
        """First segments of names below which nothing is kept: one line drops them all."""
        patterns: defaultdict[str, set[str]] = defaultdict(set)
        kept: set[str] = set()
        for name, tensor in self._tensors.items():
            prefix, dot, _ = name.partition(".")
            if name in self._left_out and dot:
                patterns[prefix].add(pattern_of(name))
            elif tensor.dropped is None:
                kept.add(prefix)
        return {
            prefix
            for prefix, found in patterns.items()
            if len(found) >= _LEAST_IN_ONE
            and prefix not in kept
            and source_pattern(prefix) == prefix
        }

    def _worth(self, source: str) -> int:
        """Least for what is left out first: what a mapping renamed, then what has another name."""
        tensor = self._tensors[source]
        if tensor.renamed_by is not None:
            return 0
        return 2 if tensor.bare.canonical == source else 1

    def _is_spare(self, source: str) -> bool:
        """Do the others give all rows that it gives?"""
        for target in self._targets[source]:
            others: list[Run] = []
            own: list[Run] = []
            for piece in self._pieces[target]:
                if piece.source == source:
                    own += piece.target_rows.runs()
                elif piece.source not in self._left_out:
                    others += piece.target_rows.runs()
            if not all(_is_within(run, _merged(others)) for run in own):
                return False
        return True


def _merged(runs: Iterable[Run]) -> list[Run]:
    merged: list[Run] = []
    for start, stop in sorted(runs):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def _is_within(run: Run, merged: Iterable[Run]) -> bool:
    return any(start <= run[0] and run[1] <= stop for start, stop in merged)
