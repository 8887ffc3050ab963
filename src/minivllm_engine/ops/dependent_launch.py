"""Programmatic dependent launch: a kernel starts while the one before it on the stream still runs.

Such a kernel loads what no kernel writes (weights), then waits until all before it are done. It writes
nothing sooner, and reads nothing that they write. Every kernel in between has to wait too, also one that has
nothing to wait for: the next one only knows about the one right before it.
"""

import functools

import torch


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Cards from sm_90 on. On a CPU kernels run in Triton's interpreter, one after the other."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
