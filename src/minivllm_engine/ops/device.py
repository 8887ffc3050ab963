"""What of a device decides how kernels are cut and launched.

Programmatic dependent launch: a kernel starts while the one before it on the stream still runs. It loads
what no step writes (weights), then waits until all before it are done. It writes nothing sooner, and reads
nothing that they write. By the time it starts, any number of the kernels before it may still run, but its
wait ends when its predecessor has ended, every program of which has waited in the same way before it ended:
so all before that one had ended too. Kernels of PyTorch and of other libraries are ordinary launches: they
start when everything before them has ended, and one that starts early after them finds nothing running but
them. That is why no program may return before it has waited. What is made of weights once, as 1 + the
weight of a norm, is made when kernels are compiled, before the first real step.
"""

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


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Say whether a card can: from sm_90 on. On a CPU kernels are interpreted, one after the other."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(early: bool | None, device: torch.device) -> dict[str, bool]:
    """Return what a kernel that can start early is launched with.

    Args:
        early: whether it does; None: where the card can.
    """
    if early is None:
        early = has_dependent_launch(device)
    return {"EARLY": early, "launch_pdl": early}
