"""What the Triton kernels run on: an NVIDIA card, or Triton's interpreter on a CPU."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton

# The interpreter computes with bf16 as if its bits were integers, so whatever is fed to a matrix product
# there must be fp32.
INTERPRETED: bool = triton.knobs.runtime.interpret


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What the size of a kernel's tiles and grid depends on.

    Attributes:
        shared_memory: bytes that one program may use.
        num_processors: streaming multiprocessors.
    """

    shared_memory: int
    num_processors: int


# In the interpreter: those of the smallest cards that are supported (sm_86).
_INTERPRETER = DeviceLimits(shared_memory=99 * 1024, num_processors=4)


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    if device.type == "cpu":
        return _INTERPRETER
    # The stubs lack some of its attributes.
    properties: Any = torch.cuda.get_device_properties(device)
    return DeviceLimits(properties.shared_memory_per_block_optin, properties.multi_processor_count)
