"""Copies between host and device that the host does not wait for, and casts that copy only if they must."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def fp32(x: torch.Tensor) -> torch.Tensor:
    return cast(x, torch.float32)


def on_device(
    numbers: Sequence[float] | Sequence[int] | np.ndarray,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Make a new tensor [len(numbers)]. On a GPU the copy is queued, from pinned memory."""
    on_host = torch.as_tensor(numbers, dtype=dtype)
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)


class HostCopy:
    """Numbers of the device on their way to the host: as they are at this point of its queue."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._host = tensor.clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.current_stream().record_event()

    def tolist(self) -> Any:
        """Wait for them. Nested lists of the tensor's shape."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
