"""Which device a plan is made for: one of this machine, or one that is only named by its size."""

from minivllm_cli.errors import CliError
from minivllm_engine.core.units import format_size
from minivllm_engine.memory.device_memory import DeviceMemory, host_memory
from minivllm_engine.memory.nvidia_smi import device_of, first_gpu


def choose_device(kind: str, memory: int | None) -> DeviceMemory:
    """The device to plan for.

    Args:
        kind: "auto", "cpu" or "cuda". `auto` is the GPU that is here, else the CPU.
        memory: bytes of a device that is not here: a GPU, unless `kind` says CPU.

    Raises:
        CliError: a GPU was asked for, there is none, and its size was not given.
    """
    if memory is not None:
        if kind == "cpu":
            return host_memory(memory)
        return DeviceMemory("cuda", f"a GPU of {format_size(memory)}", memory)
    if kind == "cpu":
        return host_memory()
    gpu = first_gpu()
    device = None if gpu is None else device_of(gpu)
    if device is not None:
        return device
    if kind == "cuda":
        why = "nvidia-smi is missing or lists none" if gpu is None else "its size is not known"
        raise CliError(
            "no usable CUDA device", why=why, hint="--memory 80GiB plans for one of that size"
        )
    return host_memory()
