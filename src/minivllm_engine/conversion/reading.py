"""Reading the tensors of a source, one at a time."""

import io
from pathlib import Path
from types import TracebackType

import torch

from minivllm_engine.checkpoint.safetensors_header import TensorEntry
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
        """A tensor, or some of its rows, in the type and shape that it has in its file.

        Raises:
            CheckpointError: the file changed since its header was read, or cannot be read.
        """
        first, last = rows or (0, entry.shape[0])
        if self._entered is not None:
            return self._mapped_tensor(entry)[first:last]
        row_bytes = entry.num_bytes // max(1, entry.shape[0])
        buffer = torch.empty((last - first) * row_bytes, dtype=torch.uint8)
        try:
            self._fill(buffer, entry, entry.begin + first * row_bytes)
        except OSError as error:
            raise CheckpointError(
                f"{entry.file} cannot be read",
                why=error.strerror or str(error),
                hint="See that it is there and that you may read it.",
            ) from None
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
