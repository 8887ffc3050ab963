"""Where a model will run, and with which operations: known before torch is loaded."""

import logging
from importlib.util import find_spec
from pathlib import Path

from minivllm_engine.core.config import USE_CPU, EngineOptions
from minivllm_engine.core.errors import BackendUnavailable, ConfigError
from minivllm_engine.memory.devices import DeviceMemory, Gpu, device_of, first_gpu, host_memory

logger = logging.getLogger(__name__)

_INSTALL_FLA = "pip install 'flash-linear-attention>=0.6,<0.7'"
_INSTALL_FLASH = "pip install 'flash-attn>=2.8,<3' --no-build-isolation"


def choose_device(options: EngineOptions) -> DeviceMemory:
    """Choose the device that `options.device` means: for `auto` the GPU, if one can be used.

    Raises:
        BackendUnavailable: `cuda` is asked for and cannot be used, or a package is missing that the GPU
            needs.
        ConfigError: backends are asked for that the device does not have.
    """
    if options.device != "cpu":
        gpu = first_gpu()
        device = None if gpu is None else device_of(gpu)
        problem = _why_no_cuda(gpu, device)
        if device is not None and problem is None:
            _check_packages(options)
            return device
        if options.device == "cuda":
            raise BackendUnavailable("no usable CUDA device", why=problem, hint=USE_CPU)
        if gpu is not None:
            logger.warning("GPU %d %s is not used: %s", gpu.index, gpu.name, problem)
    _check_cpu_backends(options)
    return host_memory()


def _why_no_cuda(gpu: Gpu | None, device: DeviceMemory | None) -> str | None:
    if not _torch_has_cuda():
        return "torch was built without CUDA"
    if gpu is None:
        return "NVML is missing or lists no GPU"
    if device is None:
        return "its driver does not say how much memory it has"
    if find_spec("triton") is None:
        return "triton is not installed (pip install 'minivllm[cuda]')"
    return None


def _torch_has_cuda() -> bool:
    """Told from torch's files: loading it takes seconds."""
    spec = find_spec("torch")
    places = [] if spec is None else spec.submodule_search_locations or []
    return any(any(Path(place, "lib").glob("*torch_cuda*")) for place in places)


def _check_packages(options: EngineOptions) -> None:
    wanted = [
        f"engine.{key} is {value}"
        for key, value in (
            ("gated_delta_prefill", options.gated_delta_prefill),
            ("gated_delta_decode", options.gated_delta_decode),
        )
        if value == "fla" or (key, value) == ("gated_delta_prefill", "auto")
    ]
    if wanted and find_spec("fla") is None:
        raise BackendUnavailable(
            "flash-linear-attention, which this needs on a GPU, is not installed",
            why=", ".join(wanted),
            hint=_INSTALL_FLA,
        )
    if options.attention_backend == "flash" and find_spec("flash_attn") is None:
        raise BackendUnavailable(
            "flash-attn is not installed",
            why="engine.attention_backend is flash",
            hint=f"{_INSTALL_FLASH}, or --set engine.attention_backend=triton",
        )


def _check_cpu_backends(options: EngineOptions) -> None:
    for key in ("attention_backend", "gated_delta_prefill", "gated_delta_decode"):
        value = getattr(options, key)
        if value not in ("auto", "reference"):
            raise ConfigError(
                f"engine.{key} {value} needs a GPU",
                why="this run uses cpu",
                hint=f"--set engine.{key}=auto",
            )
