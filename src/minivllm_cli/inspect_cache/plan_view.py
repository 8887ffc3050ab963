"""The view `plan`: what an engine would take of a device, worked out without weights, torch or GPU."""

import json
from typing import TYPE_CHECKING, Any

from minivllm_cli import engine
from minivllm_cli.cache_dump.document import plan_document
from minivllm_cli.command import Invocation
from minivllm_cli.config.settings import Settings
from minivllm_cli.config.typed_options import as_typed
from minivllm_cli.console.streams import print_result
from minivllm_cli.errors import CliError
from minivllm_cli.files.fingerprint import model_hash
from minivllm_cli.inspect_cache.solve import Solution, solve, without
from minivllm_cli.inspect_cache.table import render_table
from minivllm_engine.core.config import EngineConfig
from minivllm_engine.core.units import format_size, parse_size
from minivllm_engine.memory.devices import DeviceMemory, device_of, first_gpu, host_memory
from minivllm_engine.memory.plan import plan_warnings, refusal

if TYPE_CHECKING:
    from minivllm_cli.inspect_cache.flags import InspectFlags


def show_plan(run: Invocation, settings: Settings, flags: "InspectFlags") -> int:
    """Print the plan on stdout: the table, the YAML of `--solve`, or with `--json` one document.

    Raises:
        CliError: MODEL, the size or the device will not do.
        CapacityError: the plan does not fit; it is printed before.
    """
    memory = _memory(flags.memory)
    shape = engine.read_shape(settings.model)
    config = settings.engine_config
    if flags.solve is not None:
        config = without(config, flags.solve)
    device = _choose_device(config.engine.device, memory)
    if config.engine.device == "auto" and device.kind == "cpu":
        run.console.note("device: cpu (no GPU here; --memory SIZE plans for one)")
    planner = shape.planner(device)
    result = planner(config)
    error = None if result.ok else refusal(shape.config, config, result, tied=shape.tied)
    solution = None
    if flags.solve is not None and error is None:
        solution = solve(flags.solve, shape, config, result, planner)
        config = _solved(config, solution)
        result = solution.result
    warnings = plan_warnings(result, config)
    hint = "" if error is None or error.hint is None else as_typed(error.hint, settings)
    document = plan_document(
        settings.model,
        model_hash(shape.path),
        shape,
        config,
        result,
        planner,
        warnings=warnings,
        advice=hint.split(", or ") if hint else [],
    )
    for warning in warnings:
        run.console.warn(warning)
    _print(run, document, solution, as_json=flags.json_)
    if error is not None:
        raise error
    return 0


def _memory(text: str | None) -> int | None:
    if text is None:
        return None
    if text.strip().isdecimal():
        raise CliError(
            f"--memory {text}: a size needs its unit", hint=f"--memory {text.strip()}GiB"
        )
    try:
        size = parse_size(text)
    except ValueError as error:
        raise CliError(f"--memory: {error}", hint="--memory 80GiB") from None
    if not size:
        raise CliError("--memory: a device without memory holds nothing", hint="--memory 80GiB")
    return size


def _choose_device(kind: str, memory: int | None) -> DeviceMemory:
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
        why = "NVML is missing or lists none" if gpu is None else "its size is not known"
        raise CliError(
            "no usable CUDA device", why=why, hint="--memory 80GiB plans for one of that size"
        )
    return host_memory()


def _solved(config: EngineConfig, solution: Solution) -> EngineConfig:
    return config.model_copy(update={"engine": config.engine.model_copy(update=solution.engine)})


def _print(
    run: Invocation, document: dict[str, Any], solution: Solution | None, *, as_json: bool
) -> None:
    table = render_table(document)
    if as_json:
        if solution is not None:
            document["solve"] = solution.document()
        print_result(json.dumps(document, allow_nan=False) + "\n")
    else:
        print_result(table if solution is None else solution.yaml())
    if as_json or solution is not None:
        for line in table.splitlines():
            run.console.note(line)
