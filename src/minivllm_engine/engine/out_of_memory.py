"""When a device has less memory than the plan counted on, as where others took some after it was made."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from minivllm_engine.core.errors import CapacityError
from minivllm_engine.core.units import format_size
from minivllm_engine.engine.prepare import PreparedModel
from minivllm_engine.memory.devices import device_of, first_gpu
from minivllm_engine.memory.plan import try_plan
from minivllm_engine.memory.suggest import Change, changed

# What torch says where an allocation or a mapping of a file fails.
_OUT_OF_RAM = re.compile(
    "DefaultCPUAllocator|not enough memory|[Cc]annot allocate memory|unable to mmap"
)


@contextmanager
def shortage_named(prepared: PreparedModel) -> Iterator[None]:
    """Tell torch's error in here as one that a user can act on.

    Raises:
        CapacityError: the device's memory ran out. The error names the plan, and on a GPU who holds memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _shortage(prepared, str(error)) from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _OUT_OF_RAM.search(str(error)):
            raise
        raise _shortage_of_ram(prepared) from error


def give_back_unused(device: str) -> None:
    """Return to the driver what torch keeps of freed tensors: pools of other sizes do not fit into it."""
    if device == "cuda":
        torch.cuda.empty_cache()


def _shortage_of_ram(prepared: PreparedModel) -> CapacityError:
    plan, config = prepared.plan, prepared.asked_for
    change = Change("engine.cpu_memory", f"{plan.pool_bytes // 2 >> 20}MiB")
    fits = try_plan(prepared.model_config, changed(config, change), plan.device).ok
    return CapacityError(
        "memory ran out while the engine started",
        why=f"weights {format_size(plan.weight_bytes)}, pools {format_size(plan.pool_bytes)} of "
        f"{format_size(plan.device.total)} that this process may use",
        hint=str(change) if fits else None,
    )


def _shortage(prepared: PreparedModel, said: str) -> CapacityError:
    plan, config = prepared.plan, prepared.asked_for
    share = config.engine.gpu_memory_utilization
    budget = format_size(int(plan.device.total * share))
    why = [f"planned to take {share:.0%} of {plan.device.name}, {budget}"]
    sentences = [part.strip() for part in said.split(". ") if part.strip()]
    why += [text for text in sentences if text.startswith("Tried to allocate")][:1]
    gpu = first_gpu()
    now = None if gpu is None else device_of(gpu)
    why += [
        f"pid {process.pid} ({process.name}) holds {format_size(process.num_bytes)}"
        for process in (now.processes if now else ())
        if process.pid not in (None, os.getpid())
    ]
    change = Change("engine.gpu_memory_utilization", f"{0.8 * share:.2f}")
    fits = try_plan(prepared.model_config, changed(config, change), plan.device).ok
    return CapacityError(
        "GPU memory ran out while the engine started",
        why="\n".join(why),
        hint=str(change) if fits else None,
    )
