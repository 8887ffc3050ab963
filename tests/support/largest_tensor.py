"""Watches how large the tensors are that a piece of code makes."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """While entered, `numel` is the size of the largest storage that an operation has returned."""

    numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor) and not func.is_view:
                self.numel = max(self.numel, item.numel())
        return result
