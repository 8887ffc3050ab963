"""What of a device decides about the tiles and grids of kernels."""

import functools
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What the size of a kernel's tiles and grid depends on.

    Attributes:
        shared_memory: bytes that one program may use.
        num_processors: streaming multiprocessors.
    """

    shared_memory: int
    num_processors: int


# On a CPU kernels run in Triton's interpreter, as on the smallest cards that are supported (sm_86).
_INTERPRETER = DeviceLimits(shared_memory=99 * 1024, num_processors=4)


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    if device.type == "cpu":
        return _INTERPRETER
    # The stubs lack some of its attributes.
    properties: Any = torch.cuda.get_device_properties(device)
    return DeviceLimits(properties.shared_memory_per_block_optin, properties.multi_processor_count)
