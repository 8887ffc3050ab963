"""The JSON document that every view of `inspect-cache` renders, as the view `plan` fills it."""

from dataclasses import asdict
from typing import Any

from minivllm_cli.engine import ModelShape
from minivllm_engine.core.config import EngineConfig
from minivllm_engine.memory.fit import Fit, Planner
from minivllm_engine.memory.layout import MemoryPlan
from minivllm_engine.memory.sizes import conv_state_bytes, graph_sizes, kv_saved
from minivllm_engine.memory.suggest import (
    refused_above,
    unlowered_max_num_seqs,
    what_fits,
)

SCHEMA_VERSION = 1


def plan_document(
    name: str,
    model_hash: str,
    shape: ModelShape,
    config: EngineConfig,
    result: Fit,
    planner: Planner,
    *,
    warnings: list[str],
    advice: list[str],
    matrix: bool = True,
) -> dict[str, Any]:
    """Make the document of a plan, which need not fit.

    Args:
        name, model_hash: of the model.
        config: what the plan was made from.
        planner: plans for the same model and device with another config.
        warnings: what somebody who starts this engine should know.
        advice: things to try, each of which works.
        matrix: work out which other sizes would fit.
    """
    plan = result.plan
    positions = shape.config.max_position_embeddings
    cells = what_fits(config, plan, planner, positions=positions) if matrix else []
    accepted = refused_above(config, planner)
    unlowered = unlowered_max_num_seqs(config, result, planner)
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "cache",
        "source": "plan",
        "model": {"name": name, "hash": model_hash},
        "fits": result.ok,
        "devices": [_device(plan, shape, config)],
        "pools": _pools(plan, shape),
        "limits": {
            "max_num_seqs": plan.max_num_seqs,
            "max_model_len": plan.max_model_len,
            "max_num_batched_tokens": plan.max_num_batched_tokens,
            "largest_max_num_seqs": accepted.value,
            "bound_by": accepted.bound_by,
            "set_max_model_len": config.engine.max_model_len,  # at which that limit holds
            "unlowered_max_num_seqs": unlowered.value,
            "unlowered_bound_by": unlowered.bound_by,
            "full_length_requests": plan.full_length_requests if result.ok else 0,
            "min_reusable_prefix": plan.min_reusable_prefix,
            "kv_tokens_per_slot": plan.kv_tokens_per_slot,
        },
        "what_fits": [asdict(cell) for cell in cells],
        "hit": None,
        "nodes": [],
        "misses": {},
        "warnings": warnings,
        "advice": advice,
    }


def _device(plan: MemoryPlan, shape: ModelShape, config: EngineConfig) -> dict[str, Any]:
    device = plan.device
    on_gpu = device.kind == "cuda"
    return {
        "name": device.name,
        "kind": device.kind,
        "total": device.total,
        "budget": config.engine.gpu_memory_utilization if on_gpu else None,
        "pools_budget": plan.memory,
        "pools_why": plan.memory_why,
        "dtype": plan.dtype,
        "state_dtype": plan.state_dtype,
        "graph_sizes": list(graph_sizes(plan.max_graph_batch)) if plan.max_graph_batch else [],
        "other_processes": [
            {"pid": p.pid, "name": p.name, "bytes": p.num_bytes} for p in device.processes
        ],
        "rows": [
            {"name": row.name, "bytes": row.num_bytes, "basis": row.basis}
            for row in plan.rows(from_headers=shape.from_headers)
        ],
        "unaccounted": 0,
    }


def _pools(plan: MemoryPlan, shape: ModelShape) -> dict[str, Any]:
    model = shape.config
    conv = conv_state_bytes(model, plan.dtype)
    return {
        "kv": {
            "block_size": plan.block_size,
            "unit_bytes": plan.block_bytes,
            "total": plan.num_blocks,
            "sinks": 1,
            "used": 0,
            "peak": 0,
            "bytes_per_token": plan.block_bytes // plan.block_size,
            "layers": [model.num_attention_layers, model.num_hidden_layers],
            "saved": kv_saved(model),
        },
        "state": {
            "unit_bytes": plan.slot_bytes,
            "total": plan.max_num_seqs,
            "sinks": 1,
            "used": 0,
            "peak": 0,
            "per_request": 1,
            "conv_bytes": conv,
            "recurrent_bytes": plan.slot_bytes - conv,
        },
        "snapshots": {
            "unit_bytes": plan.slot_bytes,
            "total": plan.num_snapshots,
            "sinks": 0,
            "used": 0,
            "peak": 0,
        },
    }
