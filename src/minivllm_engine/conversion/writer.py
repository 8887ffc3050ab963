"""The shards of a plan, assembled from pieces and written tensor by tensor.

No more than one tensor is in memory: `safetensors.torch.save_file` wants all of a file at once.
"""

import hashlib
import json
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from minivllm_engine.checkpoint.rules import Transform
from minivllm_engine.conversion.manifest import FinishedShard
from minivllm_engine.conversion.patterns import pattern_of
from minivllm_engine.conversion.plan import (
    LONG_DTYPES,
    SHORT_DTYPES,
    Piece,
    Plan,
    Rows,
    Shard,
    TargetTensor,
)
from minivllm_engine.conversion.reader import (
    TORCH_DTYPES,
    TensorReader,
    count_non_finite,
    is_held_by,
    is_lossy,
    largest_finite,
    max_relative_error,
)
from minivllm_engine.conversion.report import Cast, Counter
from minivllm_engine.core.atomic_file import replacing, write_all
from minivllm_engine.core.errors import ConversionError
from minivllm_engine.core.escape import escape, listed
from minivllm_engine.core.units import count_text


def view_rows(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """View the rows as [groups, size, *rest] of `tensor`, which may be written through it."""
    step = tensor.stride(0)
    return tensor.as_strided(
        (rows.groups, rows.size, *tensor.shape[1:]),
        (rows.stride * step, step, *tensor.stride()[1:]),
        tensor.storage_offset() + rows.offset * step,
    )


def is_whole(piece: Piece, source: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Say whether the piece is all of its source and all of its target, as it is."""
    rows = Rows(0, 1, shape[0], shape[0])
    return (
        piece.transform == "copy"
        and tuple(source.shape) == shape
        and piece.source_rows == rows
        and piece.target_rows == rows
    )


def assemble(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    pieces: Iterable[Piece],
    read: Callable[[str], torch.Tensor],
) -> torch.Tensor:
    """Assemble a target tensor, contiguous, in `dtype`.

    Args:
        pieces: those of this target.
        read: gives a source tensor by name.
    """
    out: torch.Tensor | None = None
    for piece in pieces:
        source = read(piece.source)
        if is_whole(piece, source, shape) and source.dtype == dtype:
            return source.contiguous()
        if out is None:
            out = torch.empty(shape, dtype=dtype)
        view = view_rows(out, piece.target_rows)
        view.copy_(as_target(piece, source).reshape(view.shape))
    assert out is not None, "a target has at least one piece"
    return out


def as_target(piece: Piece, source: torch.Tensor) -> torch.Tensor:
    """Return the values of a piece before they are cast: [groups, size, *rest] as the source has them."""
    return forward(view_rows(source, piece.source_rows), piece.transform)


def forward(rows: torch.Tensor, transform: Transform) -> torch.Tensor:
    """Lay out values of a source [groups, size, *rest] as a target has them, before its dtype."""
    if transform == "minus_one":
        wide = rows.dtype if rows.dtype == torch.float64 else torch.float32
        return rows.to(wide) - 1
    if transform == "conv_axis":
        return rows.transpose(-1, -2)
    return rows


def backward(rows: torch.Tensor, transform: Transform) -> torch.Tensor:
    """Invert `forward`, up to rounding."""
    if transform == "minus_one":
        return rows.to(torch.float64) + 1
    if transform == "conv_axis":
        return rows.transpose(-1, -2)
    return rows


_BLOCK = 1 << 24


def write_shard(
    file: Path,
    targets: Iterable[TargetTensor],
    tensors: Iterable[torch.Tensor],
    advance: Callable[[int], None],
) -> tuple[int, str]:
    """Write `file` under a temporary name, force it to the disk, and rename it.

    Args:
        targets: what the header says, in the order of the data.
        tensors: their values in the same order; each is asked for when its turn comes.
        advance: called with the bytes of each block of a tensor that was written.

    Returns:
        Bytes of the file, and its SHA-256.
    """
    digest, size = hashlib.sha256(), 0
    with replacing(file, durable=True) as stream:
        targets = list(targets)
        header = _header(targets)
        digest.update(header)
        write_all(stream.fileno(), header)
        size += len(header)
        for target, tensor in zip(targets, tensors, strict=True):
            data = tensor.reshape(-1).view(torch.uint8).numpy().data
            assert len(data) == target.num_bytes, f"{target.name} is not what the plan says"
            for start in range(0, len(data), _BLOCK):
                block = data[start : start + _BLOCK]
                digest.update(block)
                write_all(stream.fileno(), block)
                advance(len(block))
            size += len(data)
    return size, digest.hexdigest()


def _header(targets: list[TargetTensor]) -> bytes:
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for target in targets:
        content[target.name] = {
            "dtype": LONG_DTYPES[target.dtype],
            "shape": list(target.shape),
            "data_offsets": [offset, offset + target.num_bytes],
        }
        offset += target.num_bytes
    raw = json.dumps(content, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


_SHOWN = 8


class ShardWriter:
    """Writes the shards of one plan. Keeps the last source tensor, as fused ones are used twice."""

    def __init__(self, plan: Plan, reader: TensorReader) -> None:
        self._plan = plan
        self._reader = reader
        self._entries = {entry.name: entry for entry in plan.source.tensors}
        self._targets = {target.name: target for target in plan.targets}
        self._pieces: defaultdict[str, list[Piece]] = defaultdict(list)
        for piece in plan.pieces:
            self._pieces[piece.target].append(piece)
        self._last: tuple[str, torch.Tensor] | None = None

    def write(self, shard: Shard, directory: Path, counter: Counter) -> FinishedShard:
        """Write one shard into `directory`, tensor by tensor.

        Raises:
            ConversionError: "non_finite", naming every tensor of the source with such values.
            OSError: the disk is full, and all else that writing can meet.
        """
        targets = [self._targets[name] for name in shard.tensors]
        casts: dict[tuple[str, str, str], Cast] = {}
        tensors = self._tensors(targets, casts)
        size, sha256 = write_shard(directory / shard.name, targets, tensors, counter.advance)
        return FinishedShard(shard.name, size, sha256, tuple(casts.values()))

    def _tensors(
        self,
        targets: list[TargetTensor],
        casts: dict[tuple[str, str, str], Cast],
    ) -> Iterator[torch.Tensor]:
        for target in targets:
            tensor = self._assemble(target)
            if count_non_finite(tensor):
                del tensor
                raise self._non_finite()
            self._note_casts(target, tensor, casts)
            yield tensor

    def _assemble(self, target: TargetTensor) -> torch.Tensor:
        dtype = TORCH_DTYPES[LONG_DTYPES[target.dtype]]
        return assemble(target.shape, dtype, self._pieces[target.name], self._read)

    def _read(self, name: str) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next is read: one at a time
            self._last = name, self._reader.read(self._entries[name])
        return self._last[1]

    def _note_casts(
        self, target: TargetTensor, tensor: torch.Tensor, casts: dict[tuple[str, str, str], Cast]
    ) -> None:
        for piece in self._pieces[target.name]:
            entry = self._entries[piece.source]
            if not is_lossy(TORCH_DTYPES[entry.dtype], tensor.dtype):
                continue
            exact = as_target(piece, self._read(piece.source))
            stored = view_rows(tensor, piece.target_rows)
            error = max_relative_error(exact.reshape(stored.shape), stored)
            before = SHORT_DTYPES[entry.dtype]
            key = (pattern_of(target.name), before, target.dtype)
            if key not in casts or error > casts[key].max_relative_error:
                casts[key] = Cast(*key, error, target.name)

    def _non_finite(self) -> ConversionError:
        """Read all that is to be written, and name every tensor that is not finite."""
        found: list[str] = []
        hopeless, largest = "", 0.0
        for target in self._plan.targets:
            count = count_non_finite(self._assemble(target))
            if count:
                held, most = self._held(target), self._largest(target)
                found.append(held or self._out_of_range(target, count, most))
                if held:
                    hopeless = hopeless or _failed(self._sources(target))
                elif not is_held_by(most, torch.float32):
                    hopeless = hopeless or _no_room(self._sources(target), most)
                largest = max(largest, most)
        more = f"\nand {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return ConversionError(
            f"{count_text(len(found), 'tensor')} with values that are not finite; nothing is published",
            why="\n".join(found[:_SHOWN]) + more,
            hint=hopeless or self._types_with_room(largest),
            code="non_finite",
        )

    def _held(self, target: TargetTensor) -> str | None:
        """The source of `target` that is not finite itself, if that is why."""
        for piece in self._pieces[target.name]:
            source = self._read(piece.source)
            held = count_non_finite(source, source.dtype)
            if held:
                return f"{escape(piece.source)} ({held} values)"
        return None

    def _sources(self, target: TargetTensor) -> list[str]:
        return list(dict.fromkeys(piece.source for piece in self._pieces[target.name]))

    def _largest(self, target: TargetTensor) -> float:
        return max(largest_finite(self._read(name)) for name in self._sources(target))

    def _out_of_range(self, target: TargetTensor, count: int, largest: float) -> str:
        """That the cast alone made values of `target` infinite."""
        dtype = _computed_in(target.dtype)
        return (
            f"{listed(self._sources(target))} ({count_text(count, 'value')} too large for {dtype}: up to "
            f"{largest:.3g}, it holds {_most(dtype):.3g})"
        )

    def _types_with_room(self, largest: float) -> str:
        """Where it is the cast of matrices alone that makes values infinite."""
        others = [word for word in ("bf16", "fp32") if word != self._plan.options.dtype]
        roomy = [word for word in others if is_held_by(largest, TORCH_DTYPES[LONG_DTYPES[word]])]
        named = "".join(f", or --dtype {word} ({_most(word):.3g})" for word in roomy)
        return f"--dtype keep{named}"


def _failed(sources: list[str]) -> str:
    return (
        "Convert a checkpoint whose training had not failed: NaN and infinities, as in "
        f"{listed(sources, 1)}, stay what they are in any dtype."
    )


def _no_room(sources: list[str], largest: float) -> str:
    return (
        f"No dtype has room for {largest:.3g}: fp32, the widest that a model computes in, holds "
        f"{_most('fp32'):.3g}. Correct {listed(sources, 1)} in the source: clamp it, or scale it down where "
        "it was made."
    )


def _most(word: str) -> float:
    return torch.finfo(TORCH_DTYPES[LONG_DTYPES[word]]).max


def _computed_in(dtype: str) -> str:
    """The widest type in which values of a target are ever used."""
    return "fp32" if dtype == "fp64" else dtype
