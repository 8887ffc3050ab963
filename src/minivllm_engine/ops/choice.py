"""Which operations a device and a config ask for."""

from dataclasses import replace

import torch

from minivllm_engine.core.config import USE_CPU, EngineOptions
from minivllm_engine.core.errors import BackendUnavailable
from minivllm_engine.ops.attention.flash import check_flash
from minivllm_engine.ops.attention.reference import KVShape
from minivllm_engine.ops.operations import Operations
from minivllm_engine.ops.packed import Packing
from minivllm_engine.ops.reference_backend import REFERENCE

_LEAST_CAPABILITY = (8, 0)


def choose_operations(
    device: torch.device, options: EngineOptions, shape: KVShape, dtype: torch.dtype
) -> Operations:
    """Choose the operations; `auto` stands for what was measured to be faster.

    Raises:
        BackendUnavailable: the GPU is too old, or a package is missing.
        ConfigError: a backend cannot do what the rest of the config asks for.
    """
    attend, chunks, step = (
        options.attention_backend,
        options.gated_delta_prefill,
        options.gated_delta_decode,
    )
    if device.type == "cpu":
        return replace(REFERENCE, packing=Packing())
    if attend == chunks == step == "reference":
        return REFERENCE
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        major, minor = capability
        raise BackendUnavailable(
            f"{torch.cuda.get_device_name(device)} is too old",
            why=f"its compute capability is {major}.{minor}; the kernels need 8.0",
            hint=USE_CPU,
        )
    if attend == "flash":
        check_flash(shape, dtype)
    # Triton is not there on every machine that has no GPU.
    from minivllm_engine.ops.kernel_backend import kernel_operations

    return kernel_operations(
        attend="triton" if attend == "auto" else attend,
        chunks=chunks,
        step="triton" if step == "auto" else step,
    )
