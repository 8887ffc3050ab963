"""The memory of the device that a model is to run on, as the plan needs to know it."""

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# What a process with torch, cuBLAS and Triton holds on a GPU before it has a tensor there. An estimate.
CUDA_CONTEXT_BYTES = 768 << 20
# Addresses that Python, torch and its libraries take before there is a tensor. 660 MB with torch 2.13.
LIBRARY_BYTES = 768 << 20


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


def usable_memory() -> int:
    """Return the bytes of RAM that this process may use: the machine's, or less by a limit on it.

    Limits are those of its control groups (version 1 and 2, its own and those above) and of the process
    itself (`ulimit -v` and `-d`).
    """
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = list(cgroup_limits())
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(max(0, soft - LIBRARY_BYTES))
    return min([ram, *limits])


def cgroup_limits(
    table: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """Yield the limits in bytes of the control groups of this process; none where there are none.

    Args:
        table: lines of `number:controllers:path`; version 2 has number 0 and no controllers.
        root: where the groups are mounted.
    """
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        group = top / path.lstrip("/")
        # A container may see its own group at the top, whatever path it is told.
        for folder in (group, *group.parents):
            yield from _limit(folder / ("memory.limit_in_bytes" if controllers else "memory.max"))
            if folder == top:
                break


def _limit(file: Path) -> Iterator[int]:
    try:
        text = file.read_text().strip()
    except OSError:
        return
    if text.isdecimal():  # "max" is none
        yield int(text)


def host_memory(total: int | None = None) -> DeviceMemory:
    """Return this machine as a device, or one with `total` bytes of RAM."""
    return DeviceMemory("cpu", "CPU", usable_memory() if total is None else total)
