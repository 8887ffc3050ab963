"""Memory that runs out while an engine starts, as where others took some after it was planned."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from minivllm_engine.core.errors import CapacityError
from minivllm_engine.core.units import format_size
from minivllm_engine.engine.prepare import PreparedModel
from minivllm_engine.memory.devices import device_of, first_gpu
from minivllm_engine.memory.plan import try_plan
from minivllm_engine.memory.suggest import MIB, Remedy, changed

_LESS = 0.8
_CPU_SAYS = "can't allocate memory"  # torch has no class of its own for it


@contextmanager
def shortage_named(prepared: PreparedModel) -> Iterator[None]:
    """Tell torch's error in here as one that a user can act on.

    Raises:
        CapacityError: memory ran out. The error names the plan, and who holds memory of the GPU now.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _gpu_shortage(prepared, str(error)) from error
    except MemoryError as error:
        raise _cpu_shortage(prepared, str(error)) from error
    except RuntimeError as error:
        if _CPU_SAYS not in str(error):
            raise
        raise _cpu_shortage(prepared, str(error)) from error


def give_back_unused(device: str) -> None:
    """Return to the driver what torch keeps of freed tensors: pools of other sizes do not fit into it."""
    if device == "cuda":
        torch.cuda.empty_cache()


def _gpu_shortage(prepared: PreparedModel, said: str) -> CapacityError:
    plan, share = prepared.plan, prepared.asked_for.engine.gpu_memory_utilization
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
    remedy = Remedy("engine.gpu_memory_utilization", f"{_LESS * share:.2f}")
    return _shortage(prepared, "GPU memory", why, remedy)


def _cpu_shortage(prepared: PreparedModel, said: str) -> CapacityError:
    plan = prepared.plan
    why = [
        f"planned pools of {format_size(plan.pool_bytes)} beside {format_size(plan.weight_bytes)} of weights"
    ]
    why += [f"you {text}" for text in said.split(": you ")[1:2]]
    return _shortage(
        prepared, "memory", why, Remedy("engine.cpu_memory", f"{plan.pool_bytes // 2 // MIB}MiB")
    )


def _shortage(prepared: PreparedModel, what: str, why: list[str], remedy: Remedy) -> CapacityError:
    """The error, with the remedy where the planner accepts it."""
    try:
        config = changed(prepared.asked_for, remedy)
        fits = try_plan(prepared.model_config, config, prepared.plan.device).ok
    except ValueError:
        fits = False
    return CapacityError(
        f"{what} ran out while the engine started",
        why="\n".join(why),
        hint=str(remedy) if fits else None,
    )
