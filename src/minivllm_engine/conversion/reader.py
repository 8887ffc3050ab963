"""Reading the tensors of a source one at a time, and looking at their values."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch

from minivllm_engine.checkpoint.safetensors_header import TensorEntry
from minivllm_engine.conversion.report import reading_errors
from minivllm_engine.conversion.source import Source
from minivllm_engine.conversion.torch_file import load_torch_file
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}


class TensorReader:
    """Open files of weights; a context manager. Holds no tensor itself.

    Args:
        entered: keys of the containers in files of torch.save; None for safetensors.
    """

    def __init__(self, entered: tuple[str, ...] | None = None) -> None:
        self._entered = entered
        self._streams: dict[Path, io.FileIO] = {}
        self._mapped: dict[Path, dict[str, torch.Tensor]] = {}

    @classmethod
    def of(cls, source: Source) -> "TensorReader":
        return cls(source.entered if source.format == "torch" else None)

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._mapped.clear()

    def read(self, entry: TensorEntry, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Read a tensor, or some of its rows, in the type and shape that it has in its file.

        Raises:
            CheckpointError: the file changed since its header was read, or cannot be read.
        """
        first, last = rows or (0, entry.shape[0])
        if self._entered is not None:
            return self._mapped_tensor(entry)[first:last]
        row_bytes = entry.num_bytes // max(1, entry.shape[0])
        buffer = torch.empty((last - first) * row_bytes, dtype=torch.uint8)
        with reading_errors():
            self._fill(buffer, entry, entry.begin + first * row_bytes)
        return buffer.view(TORCH_DTYPES[entry.dtype]).view(last - first, *entry.shape[1:])

    def _fill(self, buffer: torch.Tensor, entry: TensorEntry, begin: int) -> None:
        if entry.file not in self._streams:
            self._streams[entry.file] = io.FileIO(entry.file)
        stream, data, done = self._streams[entry.file], buffer.numpy().data, 0
        stream.seek(begin)
        while done < len(data):
            # One read gives 2 GiB at most.
            count = stream.readinto(data[done:])
            if not count:
                raise _changed(entry, f"it ends inside {escape(entry.name)}")
            done += count

    def _mapped_tensor(self, entry: TensorEntry) -> torch.Tensor:
        if entry.file not in self._mapped:
            weights = load_torch_file(
                entry.file,
                path=self._entered,
            )
            self._mapped[entry.file] = weights.tensors
        tensor = self._mapped[entry.file].get(entry.name)
        if tensor is None or tuple(tensor.shape) != entry.shape:
            raise _changed(entry, f"{escape(entry.name)} is not as it was")
        return tensor


def _changed(entry: TensorEntry, how: str) -> CheckpointError:
    return CheckpointError(
        f"{entry.file} has changed since its header was read",
        why=how,
        hint="Wait until it is written, then run again with --overwrite.",
    )


# Elements looked at in one go: bounds the memory that this takes.
_CHUNK = 1 << 18

# Precision and range in one number each: a cast to a type of which neither is smaller loses nothing.
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_EXPONENTS = {torch.float64: 11, torch.float32: 8, torch.float16: 5, torch.bfloat16: 8}


def count_non_finite(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """Count the values that are NaN or infinite.

    Args:
        dtype: the type that they are looked at in, by default their own, or fp32 for fp64, as no model
            computes in anything wider.
    """
    if dtype is None:
        dtype = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
    return sum(
        int((~part.isfinite()).sum())
        for part in (chunk.to(dtype) for (chunk,) in _chunks(tensor))
        if not torch.stack(torch.aminmax(part)).isfinite().all()
    )


def largest_finite(tensor: torch.Tensor) -> float:
    """Return the largest magnitude of a value that is finite."""
    return max(
        (float(part.abs().nan_to_num_(nan=0.0, posinf=0.0).max()) for (part,) in _chunks(tensor)),
        default=0.0,
    )


def is_held_by(value: float, dtype: torch.dtype) -> bool:
    """Say whether it is finite in `dtype`, rounded as a cast rounds."""
    return bool(torch.tensor(value, dtype=torch.float64).to(dtype).isfinite())


def is_lossy(before: torch.dtype, after: torch.dtype) -> bool:
    return _DIGITS[before] > _DIGITS[after] or _EXPONENTS[before] > _EXPONENTS[after]


def max_relative_error(before: torch.Tensor, after: torch.Tensor) -> float:
    """Compute max |after - before| / |before| where `before` is not 0, of two tensors of one shape."""
    worst = 0.0
    wide = torch.float64 if torch.float64 in (before.dtype, after.dtype) else torch.float32
    for a, b in _chunks(before, after):
        exact = a.to(wide)
        # 0 stays 0 in every type: 0 / 0 is the only NaN.
        error = (b.to(wide) - exact).div_(exact).abs_().nan_to_num_(nan=0.0)
        worst = max(worst, float(error.max()))
    return worst


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    flat = [tensor.reshape(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), _CHUNK):
        yield tuple(tensor[start : start + _CHUNK] for tensor in flat)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread until the block ends; then in as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
