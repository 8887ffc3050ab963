"""The devices of this machine and their memory, as NVML, the kernel and the limits on this process tell it.

Loads no torch. A missing driver or library means that there is no GPU.
"""

import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
        kind: a CPU's memory is the machine's RAM, or what this process may have of it.
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
    for line in (_read(table) or "").splitlines():
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
    text = (_read(file) or "").strip()
    if text.isdecimal():  # "max" is none
        yield int(text)


def host_memory(total: int | None = None) -> DeviceMemory:
    """Return this machine as a device, or one with `total` bytes of RAM."""
    return DeviceMemory("cpu", "CPU", usable_memory() if total is None else total)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Sizes in bytes; `total` is None where the driver does not say.

    Attributes:
        driver: its version.
        used, free: by and for processes; what is left of the total the driver keeps for itself.
    """

    index: int
    name: str
    driver: str
    total: int | None
    used: int | None
    free: int | None
    processes: tuple[DeviceProcess, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU at this moment. None where the driver does not say.

    Attributes:
        clock_mhz: of the multiprocessors.
        power_cap_w: the limit that is in force.
        pids: processes that compute on it.
    """

    clock_mhz: int | None
    power_cap_w: float | None
    temperature_c: int | None
    pids: frozenset[int] = frozenset()


def list_gpus() -> list[Gpu]:
    """Return all GPUs of this machine, without their processes."""
    with _driver() as nvml:
        if nvml is None:
            return []
        handles = (_asked(nvml.nvmlDeviceGetHandleByIndex, i) for i in range(_count(nvml)))
        return [_gpu(nvml, handle) for handle in handles if handle is not None]


def first_gpu(environ: Mapping[str, str] = os.environ) -> Gpu | None:
    """Return the GPU that a program started here would use, with its processes, or None."""
    with _driver() as nvml:
        handle = None if nvml is None else _chosen(nvml, environ)
        return None if handle is None else _gpu(nvml, handle, with_processes=True)


def gpu_state(environ: Mapping[str, str] = os.environ) -> GpuState | None:
    """Return what the GPU that `first_gpu` finds does now, or None."""
    with _driver() as nvml:
        handle = None if nvml is None else _chosen(nvml, environ)
        if nvml is None or handle is None:
            return None
        milliwatts = _asked(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        return GpuState(
            _asked(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            None if milliwatts is None else milliwatts / 1000,
            _asked(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            frozenset(process.pid for process in _processes(nvml, handle)),
        )


def device_of(gpu: Gpu) -> DeviceMemory | None:
    """Return a GPU as the plan needs it, or None if the driver does not say how much memory there is."""
    if gpu.total is None:
        return None
    processes = gpu.processes
    listed = sum(process.num_bytes for process in processes)
    used = gpu.used or 0
    if used > listed:
        # Other containers, graphics, and what the driver does not attribute.
        processes = (*processes, DeviceProcess(None, "not listed", used - listed))
    reserved = 0 if gpu.free is None or gpu.used is None else gpu.total - gpu.used - gpu.free
    return DeviceMemory(
        "cuda", f"GPU {gpu.index} {gpu.name}", gpu.total, processes, max(reserved, 0)
    )


@contextmanager
def _driver() -> Iterator[Any]:
    """NVML, begun and ended; None where there is none."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        _asked(pynvml.nvmlShutdown)


def _asked(function: Any, *args: Any, **options: Any) -> Any:
    """What NVML answers, or None if the driver or the GPU does not tell."""
    import pynvml

    try:
        return function(*args, **options)
    except pynvml.NVMLError:
        return None


def _count(nvml: Any) -> int:
    return _asked(nvml.nvmlDeviceGetCount) or 0


def _chosen(nvml: Any, environ: Mapping[str, str]) -> Any:
    """The handle of the first GPU in CUDA_VISIBLE_DEVICES: a number, or the beginning of a UUID."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    chosen = "0" if visible is None else visible.split(",")[0].strip()
    if chosen.isdecimal():
        return _asked(nvml.nvmlDeviceGetHandleByIndex, int(chosen))
    if not chosen.startswith(("GPU-", "MIG-")):
        return None
    exact = _asked(nvml.nvmlDeviceGetHandleByUUID, chosen)
    if exact is not None:
        return exact
    handles = [_asked(nvml.nvmlDeviceGetHandleByIndex, i) for i in range(_count(nvml))]
    uuids = ((handle, _asked(nvml.nvmlDeviceGetUUID, handle)) for handle in handles if handle)
    return next((handle for handle, uuid in uuids if uuid and uuid.startswith(chosen)), None)


def _gpu(nvml: Any, handle: Any, *, with_processes: bool = False) -> Gpu:
    # Of the second version `used` leaves out what the driver keeps; old drivers know the first only.
    memory = _asked(nvml.nvmlDeviceGetMemoryInfo, handle, version=nvml.nvmlMemory_v2)
    memory = memory or _asked(nvml.nvmlDeviceGetMemoryInfo, handle)
    # A slice of a GPU has no number of its own.
    whole = _asked(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle) or handle
    held = _processes(nvml, handle) if with_processes else []
    return Gpu(
        _asked(nvml.nvmlDeviceGetIndex, whole) or 0,
        _asked(nvml.nvmlDeviceGetName, handle) or "?",
        _asked(nvml.nvmlSystemGetDriverVersion) or "?",
        None if memory is None else memory.total,
        None if memory is None else memory.used,
        None if memory is None else memory.free,
        tuple(
            DeviceProcess(one.pid, _process_name(one.pid), one.usedGpuMemory)
            for one in held
            if one.usedGpuMemory
        ),
    )


def _processes(nvml: Any, handle: Any) -> list[Any]:
    return _asked(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []


def _process_name(pid: int) -> str:
    return (_read(Path(f"/proc/{pid}/comm")) or "").strip() or "?"
