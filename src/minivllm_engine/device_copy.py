"""Numbers of the host on the device, without the host waiting for what the device is still doing."""

from collections.abc import Sequence

import torch


def on_device(
    numbers: Sequence[float] | Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A new tensor [len(numbers)]. On a GPU the copy is queued, from pinned memory."""
    on_host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)
