"""The memory of the device that a model is to run on, as the plan needs to know it."""

import os
from dataclasses import dataclass
from typing import Literal

# What a process with torch, cuBLAS and Triton holds on a GPU before it has a tensor there. An estimate.
CUDA_CONTEXT_BYTES = 768 << 20


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """Memory of a GPU that somebody else holds. `pid` is None where the driver does not tell who."""

    pid: int | None
    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device. Sizes in bytes.

    Attributes:
        kind: a CPU's memory is the machine's RAM.
        name: as people call it, such as "NVIDIA H200".
        processes: others on this GPU; for a CPU none are counted.
        reserved: what the driver keeps for itself.
    """

    kind: Literal["cpu", "cuda"]
    name: str
    total: int
    processes: tuple[DeviceProcess, ...] = ()
    reserved: int = 0

    @property
    def held_by_others(self) -> int:
        return sum(process.num_bytes for process in self.processes)

    @property
    def context(self) -> int:
        """What our own process holds apart from tensors."""
        return CUDA_CONTEXT_BYTES if self.kind == "cuda" else 0


def physical_memory() -> int:
    """RAM of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_memory(total: int | None = None) -> DeviceMemory:
    """This machine as a device, or one with `total` bytes of RAM."""
    return DeviceMemory("cpu", "CPU", physical_memory() if total is None else total)
