"""Written files read back, the mapping inverted, and the result compared with the source."""

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from minivllm_engine.checkpoint.safetensors_header import TensorEntry, read_header
from minivllm_engine.conversion.assembling import backward, view_rows
from minivllm_engine.conversion.plan import Piece, Plan, Rows
from minivllm_engine.conversion.problems import pattern_of
from minivllm_engine.conversion.progress import Counter
from minivllm_engine.conversion.reading import TensorReader
from minivllm_engine.conversion.report import Difference
from minivllm_engine.conversion.targets import LONG_DTYPES
from minivllm_engine.conversion.values import count_non_finite

# Plain ranges of rows are compared in parts of about so many bytes.
_CHUNK_BYTES = 1 << 26
# What taking 1 off in fp32 and adding it again may change, for |w| up to 1; beyond, times |w|.
_SHIFT_TOLERANCE = 2.0**-22


def compare_headers(plan: Plan, directory: Path) -> tuple[dict[str, TensorEntry], list[Difference]]:
    """The tensors found in the shards of `directory`, and how they differ from the plan."""
    entries: dict[str, TensorEntry] = {}
    for shard in plan.shards:
        if (directory / shard.name).is_file():
            entries |= {entry.name: entry for entry in read_header(directory / shard.name)}
    differences = []
    for target in plan.targets:
        entry = entries.get(target.name)
        if entry is None:
            differences.append(Difference("missing", target.name, "is in no shard"))
        elif entry.shape != target.shape:
            detail = f"is {list(entry.shape)}, not {list(target.shape)}"
            differences.append(Difference("shape", target.name, detail))
        elif entry.dtype != LONG_DTYPES[target.dtype]:
            detail = f"is {entry.dtype}, not {LONG_DTYPES[target.dtype]}"
            differences.append(Difference("dtype", target.name, detail))
    known = {target.name for target in plan.targets}
    differences += [
        Difference("unexpected", name, "nothing of the source becomes it")
        for name in entries
        if name not in known
    ]
    return entries, differences


def sample_of(plan: Plan) -> list[str]:
    """One source tensor for each line of the mapping table that is written."""
    first: dict[str, str] = {}
    for piece in plan.pieces:
        first.setdefault(pattern_of(piece.source), piece.source)
    return list(first.values())


class Verifier:
    """Compares source tensors with what the shards of a directory hold of them."""

    def __init__(self, plan: Plan, directory: Path, reader: TensorReader) -> None:
        self._sources = {entry.name: entry for entry in plan.source.tensors}
        self._pieces: defaultdict[str, list[Piece]] = defaultdict(list)
        for piece in plan.pieces:
            self._pieces[piece.source].append(piece)
        self._reader = reader
        position = {target.name: i for i, target in enumerate(plan.targets)}
        self._order = {
            name: min(position[piece.target] for piece in pieces)
            for name, pieces in self._pieces.items()
        }
        self._shard = {name: i for i, s in enumerate(plan.shards, 1) for name in s.tensors}
        self._written, self.header_differences = compare_headers(plan, directory)
        self._broken = {difference.name for difference in self.header_differences}

    @property
    def names(self) -> list[str]:
        """Source tensors of which something is written, in the order of their targets."""
        return sorted(self._pieces, key=self._order.__getitem__)

    def num_bytes(self, names: list[str]) -> int:
        return sum(self._sources[name].num_bytes for name in names)

    def compare(self, names: list[str], counter: Counter) -> list[Difference]:
        """Compare these source tensors; those whose targets are not there are left to the headers."""
        differences: list[Difference] = []
        with TensorReader() as written:
            for name in sorted(names, key=self._order.__getitem__):
                for piece in self._pieces[name]:
                    counter.enter_shard(self._shard[piece.target])
                    if piece.target not in self._broken:
                        differences += self._compare_piece(piece, written, counter)
                    else:
                        counter.advance(self._bytes_of(piece, piece.source_rows))
        return differences

    def _bytes_of(self, piece: Piece, rows: Rows) -> int:
        entry = self._sources[piece.source]
        return entry.num_bytes * rows.count // max(1, entry.shape[0])

    def _compare_piece(
        self, piece: Piece, written: TensorReader, counter: Counter
    ) -> list[Difference]:
        source, target = self._sources[piece.source], self._written[piece.target]
        count, worst, non_finite = 0, 0.0, 0
        for source_rows, target_rows in _parts(piece, source):
            original = self._read(self._reader, source, source_rows)
            stored = self._read(written, target, target_rows)
            non_finite += count_non_finite(stored)
            wrong, error = _compare(original, stored, piece)
            count += wrong
            worst = max(worst, error)
            counter.advance(self._bytes_of(piece, source_rows))
        found = []
        if non_finite:
            found.append(Difference("non_finite", piece.target, f"{non_finite} values"))
        if count:
            detail = f"{count} values of {piece.target} differ, by up to {worst:.3g}"
            found.append(Difference("value", piece.source, detail))
        return found

    @staticmethod
    def _read(reader: TensorReader, entry: TensorEntry, rows: Rows) -> torch.Tensor:
        """Rows as [groups, size, *rest]."""
        if rows.groups == 1:
            return reader.read(entry, (rows.offset, rows.offset + rows.size)).unsqueeze(0)
        return view_rows(reader.read(entry), rows)


def _parts(piece: Piece, source: TensorEntry) -> Iterator[tuple[Rows, Rows]]:
    """A piece of two plain ranges in parts of bounded size; any other as it is."""
    from_rows, to_rows = piece.source_rows, piece.target_rows
    if from_rows.groups > 1 or to_rows.groups > 1:
        yield from_rows, to_rows
        return
    row_bytes = max(1, source.num_bytes // max(1, source.shape[0]))
    step = max(1, _CHUNK_BYTES // row_bytes)
    for start in range(0, from_rows.size, step):
        size = min(step, from_rows.size - start)
        yield (
            Rows(from_rows.offset + start, 1, size, size),
            Rows(to_rows.offset + start, 1, size, size),
        )


def _compare(original: torch.Tensor, stored: torch.Tensor, piece: Piece) -> tuple[int, float]:
    """(values that differ, largest difference) of rows of a source and what was made of them."""
    back = backward(stored, piece.transform).reshape(original.shape)
    if piece.transform == "minus_one":
        exact = original.double()
        error = (back.double() - exact).abs()
        wrong = ~(error <= _SHIFT_TOLERANCE * exact.abs().clamp(min=1))
    else:
        # What the cast to the target's type makes of the source is what has to come back.
        expected = original.to(stored.dtype)
        wrong = back != expected
        error = (back.double() - expected.double()).abs() if wrong.any() else torch.zeros(1)
    count = int(wrong.sum())
    worst = float(error.max()) if count else 0.0
    return count, worst if math.isfinite(worst) else math.inf
