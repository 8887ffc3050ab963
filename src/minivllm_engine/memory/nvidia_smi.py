"""What `nvidia-smi` says of the GPUs here. Loads no torch, and takes a missing driver for no GPU."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from minivllm_engine.memory.device_memory import DeviceMemory, DeviceProcess

MIB = 2**20


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
    """All GPUs of this machine, without their processes."""
    return parse_gpus(
        _ask("--query-gpu=index,name,driver_version,memory.total,memory.used,memory.free")
    )


def first_gpu(environ: Mapping[str, str] = os.environ) -> Gpu | None:
    """The GPU that a program started here would use, with its processes; None where there is none."""
    chosen = _chosen(environ)
    if chosen is None:
        return None
    only = ("-i", chosen)
    query = "--query-gpu=index,name,driver_version,memory.total,memory.used,memory.free"
    found = parse_gpus(_ask(query, *only))
    if not found:
        return None
    apps = _ask("--query-compute-apps=pid,process_name,used_memory", *only)
    return replace(found[0], processes=parse_processes(apps))


def _chosen(environ: Mapping[str, str]) -> str | None:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    chosen = "0" if visible is None else visible.split(",")[0].strip()
    return None if chosen in ("", "-1", "NoDevFiles") else chosen


def gpu_state(environ: Mapping[str, str] = os.environ) -> GpuState | None:
    """What the GPU that `first_gpu` finds does now; None where there is none."""
    chosen = _chosen(environ)
    if chosen is None:
        return None
    only = ("-i", chosen)
    state = parse_state(_ask("--query-gpu=clocks.sm,power.limit,temperature.gpu", *only))
    if state is None:
        return None
    pids = _ask("--query-compute-apps=pid", *only).split()
    return replace(state, pids=frozenset(int(pid) for pid in pids if pid.isdecimal()))


def parse_state(text: str) -> GpuState | None:
    """The first line of `--query-gpu=clocks.sm,power.limit,temperature.gpu`; None where there is none."""
    parts = [part.strip() for part in (text.splitlines() or [""])[0].split(",")]
    if len(parts) != 3:
        return None
    clock, power, temperature = parts
    return GpuState(_whole(clock), _decimal(power), _whole(temperature))


def device_of(gpu: Gpu) -> DeviceMemory | None:
    """A GPU as the plan needs it; None where the driver does not say how much memory there is."""
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


def parse_gpus(text: str) -> list[Gpu]:
    """The lines of `--query-gpu=index,name,driver_version,memory.total,memory.used,memory.free`."""
    found = []
    for line in text.splitlines():
        # A name may hold a comma; nothing else does.
        index, _, rest = line.partition(",")
        parts = [part.strip() for part in rest.rsplit(",", 4)]
        if len(parts) != 5 or not index.strip().isdecimal():
            continue
        name, driver = parts[:2]
        total, used, free = (_mebibytes(part) for part in parts[2:])
        found.append(Gpu(int(index), name, driver, total, used, free))
    return found


def parse_processes(text: str) -> tuple[DeviceProcess, ...]:
    """The lines of `--query-compute-apps=pid,process_name,used_memory` that say how much they hold."""
    found = []
    for line in text.splitlines():
        pid, _, rest = line.partition(",")
        path, _, size = rest.rpartition(",")
        held = _mebibytes(size.strip())
        if pid.strip().isdecimal() and held:
            name = path.strip().replace("\\", "/").rpartition("/")[2]
            found.append(DeviceProcess(int(pid), name or "?", held))
    return tuple(found)


def _mebibytes(text: str) -> int | None:
    # "[N/A]" and "[Not Supported]" are what it prints where it does not know.
    return int(text) * MIB if text.isdecimal() else None


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _decimal(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _ask(query: str, *options: str) -> str:
    return command_output(["nvidia-smi", *options, query, "--format=csv,noheader,nounits"]) or ""


def command_output(args: Sequence[str]) -> str | None:
    """What a program prints, or None where it is missing, fails or takes longer than 10 s."""
    try:
        done = subprocess.run(args, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
