"""What fits, before any weight is loaded: the plan an engine sizes itself from, or why there is none."""

import logging

from minivllm_engine.core.config import EngineConfig
from minivllm_engine.core.errors import CapacityError
from minivllm_engine.core.units import format_size
from minivllm_engine.memory.devices import DeviceMemory, host_memory
from minivllm_engine.memory.fit import Fit, Planner
from minivllm_engine.memory.layout import MemoryPlan
from minivllm_engine.memory.suggest import suggest_changes
from minivllm_engine.model_config.config import ModelConfig

logger = logging.getLogger(__name__)


def plan_memory(
    model: ModelConfig,
    config: EngineConfig,
    memory: DeviceMemory | int,
    *,
    tied: bool | None = None,
) -> MemoryPlan:
    """Size everything of an engine. Defaults that do not fit are lowered, with one warning each.

    Args:
        memory: the device, or the bytes of RAM of a machine that computes on its CPU.
        tied: the output head is the embedding; None takes the config's word for it.

    Raises:
        CapacityError: what was set does not fit; the error names what would.
        ConfigError: `max_model_len` is beyond what the model's positions are made for.
    """
    device = host_memory(memory) if isinstance(memory, int) else memory
    result = try_plan(model, config, device, tied=tied)
    if not result.ok:
        raise refusal(model, config, result, tied=tied)
    for warning in plan_warnings(result, config):
        logger.warning("%s", warning)
    return result.plan


def try_plan(
    model: ModelConfig, config: EngineConfig, device: DeviceMemory, *, tied: bool | None = None
) -> Fit:
    """Plan as `plan_memory` does, but silently, and with a result also where it does not fit.

    Raises:
        ConfigError: `max_model_len` is beyond what the model's positions are made for.
    """

    return planner_of(model, device, tied)(config)


def planner_of(model: ModelConfig, device: DeviceMemory, tied: bool | None = None) -> Planner:
    """Return the planner of a model on a device; without `tied` the config's word is taken for it."""
    return Planner(model, device, model.tie_word_embeddings if tied is None else tied)


def plan_warnings(result: Fit, config: EngineConfig) -> list[str]:
    """List what whoever starts this engine should know: lowered defaults, a cache that cannot hit."""
    texts = [
        f"{one.key} lowered from {one.wanted} to {one.value}: {one.why}" for one in result.lowered
    ]
    plan = result.plan
    asked_for_none = not plan.prefix_cache or config.cache.snapshot_memory == 0
    if not result.ok or asked_for_none or plan.min_reusable_prefix is not None:
        return texts
    if not plan.num_snapshots:
        texts.append(
            f"the prefix cache cannot hit: a state snapshot takes {format_size(plan.slot_bytes)}, "
            "more than cache.snapshot_memory"
        )
    else:
        texts.append(
            "the prefix cache cannot hit: its shortest prefix is longer than "
            f"engine.max_model_len {plan.max_model_len} allows"
        )
    return texts


def refusal(
    model: ModelConfig, config: EngineConfig, result: Fit, *, tied: bool | None = None
) -> CapacityError:
    """Make the error for a `result` that is not ok: the pool, the numbers, and changes that work."""
    device = result.plan.device
    changes = suggest_changes(config, planner_of(model, device, tied))
    what, why = _what_does_not_fit(config, result, {one.key: one.value for one in changes})
    if device.processes:
        biggest = max(device.processes, key=lambda process: process.num_bytes)
        who = biggest.name if biggest.pid is None else f"pid {biggest.pid} ({biggest.name})"
        why += f"\n{who} holds {format_size(biggest.num_bytes)} on {device.name}"
    return CapacityError(what, why=why, hint=", or ".join(map(str, changes)) or None)


def _what_does_not_fit(
    config: EngineConfig, result: Fit, fitting: dict[str, str]
) -> tuple[str, str]:
    """Names what was set too large, if one key is to blame, else the sum of everything."""
    plan = result.plan
    weights, activations = format_size(plan.weight_bytes), format_size(plan.activation_bytes)
    pools = f"all pools together get {format_size(plan.memory)}"
    if plan.memory <= 0:
        pools = f"weights {weights} and activations {activations} leave nothing for the pools"
    engine, cache = config.engine, config.cache
    if "engine.max_num_seqs" in fitting:
        return (
            f"max_num_seqs {plan.max_num_seqs} needs {plan.max_num_seqs} state slots "
            f"({format_size(plan.state_bytes)}); {_so_many_fit(fitting['engine.max_num_seqs'])}",
            f"{pools}; a slot takes {format_size(plan.slot_bytes)}",
        )
    if "engine.max_model_len" in fitting:
        tokens = int(fitting["engine.max_model_len"])
        return (
            f"engine.max_model_len {engine.max_model_len} needs {plan.blocks_per_sequence} KV blocks; "
            f"{_so_many_fit(tokens // plan.block_size)}",
            f"{pools}; a block holds {plan.block_size} tokens and takes {format_size(plan.block_bytes)}",
        )
    if "cache.snapshot_memory" in fitting:
        return (
            f"cache.snapshot_memory {format_size(cache.snapshot_memory or 0)} does not fit; "
            f"{fitting['cache.snapshot_memory']} does",
            f"{pools}; a snapshot takes {format_size(plan.slot_bytes)}",
        )
    if "cache.num_blocks" in fitting:
        return (
            f"cache.num_blocks {cache.num_blocks} needs {format_size(plan.kv_bytes)}; "
            f"{_so_many_fit(fitting['cache.num_blocks'])}",
            f"{pools}; a block takes {format_size(plan.block_bytes)}",
        )
    used = plan.weight_bytes + plan.activation_bytes
    on_cpu = plan.device.kind == "cpu"
    if on_cpu and engine.cpu_memory is not None and engine.cpu_memory + used > plan.device.total:
        return (
            f"engine.cpu_memory {format_size(engine.cpu_memory)} is more than there is: "
            f"{format_size(max(plan.device.total - used, 0))} are left for the pools",
            f"weights {weights}, activations {activations} of {format_size(plan.device.total)}",
        )
    beside = ""
    if plan.device.context:
        beside = f"CUDA and its libraries {format_size(plan.device.context)}, "
    if plan.graph_bytes:
        beside += f"graphs {format_size(plan.graph_bytes)}, "
    need = plan.device.total - _outside(plan) + result.shortfall
    return (
        f"needs {format_size(need)} at least; {format_size(need - result.shortfall)} of "
        f"{format_size(plan.device.total)} can be used",
        f"{beside}weights {weights}, activations {activations}, "
        f"pools {format_size(plan.pool_bytes)}; a slot takes {format_size(plan.slot_bytes)}",
    )


def _so_many_fit(count: int | str) -> str:
    return f"{count} {'fits' if int(count) == 1 else 'fit'}"


def _outside(plan: MemoryPlan) -> int:
    return next(r.num_bytes for r in plan.rows(from_headers=False) if r.name == "outside budget")
