"""Written files read back, the mapping inverted, and the result compared with the source."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from minivllm_engine.checkpoint.index import CheckpointIndex, resolve_model
from minivllm_engine.checkpoint.locate import expanded
from minivllm_engine.checkpoint.mismatch import MANIFEST
from minivllm_engine.checkpoint.safetensors_header import TensorEntry, read_header
from minivllm_engine.checkpoint.shard_index import read_shard_index
from minivllm_engine.conversion.destination import INDEX
from minivllm_engine.conversion.explaining import not_covered
from minivllm_engine.conversion.manifest import (
    index_content,
    manifest_options,
    read_manifest,
    sha256_of,
)
from minivllm_engine.conversion.patterns import pattern_of
from minivllm_engine.conversion.plan import LONG_DTYPES, Piece, Plan, Rows
from minivllm_engine.conversion.planning import (
    heads_in_question,
    plan_conversion,
    plan_with_own_head,
)
from minivllm_engine.conversion.reader import TensorReader, count_non_finite, one_thread
from minivllm_engine.conversion.report import (
    Callback,
    Counter,
    Difference,
    Progress,
    reading_errors,
)
from minivllm_engine.conversion.source import Source
from minivllm_engine.conversion.source_files import carried_name
from minivllm_engine.conversion.writer import backward, view_rows
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.model_config.generation_config import read_json_object

_CHUNK_BYTES = 1 << 26


def same_values(
    head: TensorEntry, embedding: TensorEntry, reader: TensorReader, progress: Callback | None
) -> bool:
    """Compare two tensors value by value, some rows at a time; types may differ."""
    if head.shape != embedding.shape:
        return False
    counter = Counter(progress, "compare", 1, head.num_bytes + embedding.num_bytes)
    row_bytes = max(1, (head.num_bytes + embedding.num_bytes) // max(1, head.shape[0]))
    step = max(1, _CHUNK_BYTES // row_bytes)
    for start in range(0, head.shape[0], step):
        rows = (start, min(start + step, head.shape[0]))
        first, second = reader.read(head, rows), reader.read(embedding, rows)
        if first.dtype != second.dtype:
            first, second = first.double(), second.double()
        if not torch.equal(first, second):
            return False
        counter.advance((rows[1] - rows[0]) * row_bytes)
    return True


def settle_head(plan: Plan, dst: Path, reader: TensorReader, progress: Callback | None) -> Plan:
    """Return the plan, or where the head that it drops is not the embedding, one that keeps both."""
    if all(same_values(*pair, reader, progress) for pair in heads_in_question(plan)):
        return plan
    return plan_with_own_head(plan, dst)


# What taking 1 off in fp32 and adding it again may change, for |w| up to 1; beyond, times |w|.
_SHIFT_TOLERANCE = 2.0**-22


def compare_headers(plan: Plan, directory: Path) -> tuple[dict[str, TensorEntry], list[Difference]]:
    """Find the tensors in the shards of `directory`, and how they differ from the plan."""
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
    """Return one source tensor for each line of the mapping table that is written."""
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


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `check` compared, and found."""

    num_shards: int
    num_tensors: int
    num_bytes: int
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "kind": "convert-check",
            "shards": self.num_shards,
            "tensors": self.num_tensors,
            "bytes": self.num_bytes,
            "differences": [asdict(difference) for difference in self.differences],
            "ok": self.ok,
        }


@reading_errors()
def check(
    source: Source, dst: str | Path, *, progress: Callable[[Progress], None] | None = None
) -> CheckReport:
    """Read `dst` again, verify its hashes, invert the mapping and compare with `source`; scan values.

    The options of the conversion are taken from the manifest in `dst`. Writes nothing.

    Raises:
        CheckpointError: `dst` has no manifest, or the source cannot be read.
        ConversionError: code "not_covered": the source no longer has a plan without problems.
    """
    dst = expanded(dst)
    manifest = read_manifest(dst)
    plan = plan_conversion(source, manifest_options(manifest, dst / MANIFEST))
    with one_thread(), TensorReader.of(source) as reader:
        plan = settle_head(plan, dst, reader, progress)
        if not plan.ok:
            raise not_covered(plan)
        differences = [
            *_compare_files(plan, dst, manifest, progress),
            *_check_source(source, progress),
        ]
        verifier = Verifier(plan, dst, reader)
        counter = Counter(progress, "check", len(plan.shards), verifier.num_bytes(verifier.names))
        differences += verifier.header_differences
        differences += verifier.compare(verifier.names, counter)
        differences += _not_loadable(plan, dst, found_wrong=bool(differences))
    return CheckReport(len(plan.shards), len(plan.targets), plan.bytes_out, tuple(differences))


def _check_source(source: Source, progress: Callback | None) -> Iterator[Difference]:
    """Read files of torch.save by another way than the writer did, which mapped them."""
    if source.format != "torch":
        return
    from minivllm_engine.conversion.torch_archive import damaged_records

    total = sum(file.stat().st_size for file in source.files)
    counter = Counter(progress, "hash", len(source.files), total)
    for number, file in enumerate(source.files, 1):
        counter.enter_shard(number)
        for detail in damaged_records(file, counter.advance):
            yield Difference("source", file.name, detail)


def _not_loadable(plan: Plan, dst: Path, *, found_wrong: bool) -> Iterator[Difference]:
    """What is as it was made to be, and will not be loaded all the same.

    Args:
        found_wrong: something differs already, which the loader would only say again.
    """
    for name in plan.missing:
        yield Difference("incomplete", name, "left out by --allow-missing: it will not be loaded")
    if plan.missing or found_wrong:
        return
    try:
        CheckpointIndex.open(resolve_model(dst)).check(ModelConfig.from_dir(dst))
    except CheckpointError as error:
        why = error.why.splitlines()[0] if error.why else ""
        yield Difference("refused", dst.name, f"{error.what}: {why}" if why else error.what)


def _compare_files(
    plan: Plan, dst: Path, manifest: Mapping[str, Any], progress: Callback | None
) -> Iterator[Difference]:
    recorded = {shard["name"]: shard for shard in manifest["shards"]}
    present = [shard for shard in plan.shards if (dst / shard.name).is_file()]
    total = sum((dst / shard.name).stat().st_size for shard in present)
    counter = Counter(progress, "hash", len(plan.shards), total)
    for number, shard in enumerate(plan.shards, 1):
        counter.enter_shard(number)
        if shard not in present:
            yield Difference("missing", shard.name, "the file is not there")
        elif shard.name not in recorded:
            yield Difference("hash", shard.name, "the manifest does not name it")
        elif sha256_of(dst / shard.name, counter.advance) != recorded[shard.name]["sha256"]:
            yield Difference("hash", shard.name, "is not the file that the manifest names")
    known = {shard.name for shard in plan.shards}
    for file in sorted(dst.glob("*.safetensors")):
        if file.name not in known:
            yield Difference("unexpected", file.name, "belongs to no shard")
    if len(plan.shards) > 1:
        yield from _compare_index(plan, dst)
    yield from _compare_config(plan, dst)
    for file in plan.source.side_files:
        name = carried_name(file)
        if not (dst / name).is_file():
            yield Difference("side_file", name, "is not there")
        elif (dst / name).read_bytes() != file.read_bytes():
            yield Difference("side_file", name, "differs from the source's")


def _compare_index(plan: Plan, dst: Path) -> Iterator[Difference]:
    try:
        found = read_shard_index(dst / INDEX).weight_map
    except CheckpointError as error:
        yield Difference("missing", INDEX, error.what)
        return
    if dict(found) != index_content(plan)["weight_map"]:
        yield Difference("config", INDEX, "does not say where the tensors lie")


def _compare_config(plan: Plan, dst: Path) -> Iterator[Difference]:
    try:
        found = read_json_object(dst / "config.json")
    except CheckpointError as error:
        yield Difference("config", "config.json", str(error.why))
        return
    if found != plan.config:
        text, wanted = found.get("text_config"), plan.config["text_config"]
        keys = [key for key in wanted if not isinstance(text, dict) or text.get(key) != wanted[key]]
        yield Difference(
            "config", "config.json", f"differs in {', '.join(keys) or 'its outer keys'}"
        )
