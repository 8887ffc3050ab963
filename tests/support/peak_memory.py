"""Counts the bytes of all tensors that a piece of code keeps alive at one time."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class PeakMemory(TorchDispatchMode):
    """While entered, `peak` is the most bytes that storages made inside held at one time.

    What a kernel allocates and frees within itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._held = 0
        self._alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if _has_storage(item) and not _is_old(item, args, kwargs):
                self._count(item.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def freed(_: object) -> None:
            del self._alive[key]
            self._held -= size

        self._alive[key] = weakref.ref(storage, freed)
        self._held += size
        self.peak = max(self.peak, self._held)


def _has_storage(value: object) -> bool:
    # Weights that oneDNN has laid out have none that can be seen.
    return isinstance(value, torch.Tensor) and not value.is_mkldnn


def _is_old(item: torch.Tensor, args: tuple, kwargs: dict | None) -> bool:
    """Is it a view of an argument, or an argument that was written to?"""
    given = [*args, *(kwargs or {}).values()]
    flat = [y for x in given for y in (x if isinstance(x, tuple | list) else (x,))]
    pointers = {x.untyped_storage()._cdata for x in flat if _has_storage(x)}
    return item.untyped_storage()._cdata in pointers
