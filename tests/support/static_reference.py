"""The reference operations behind the interface of those that a CUDA graph is captured from.

What they may not know on the host they read from tensors here, which on a CPU costs nothing. Padding
lanes go to the sink entries, where the kernels skip them.
"""

from dataclasses import replace
from typing import Any

import torch

from minivllm_engine.model_input import ModelInput
from minivllm_engine.ops.attention.reference import AttentionPlan, KVShape
from minivllm_engine.ops.fused import reference as fused
from minivllm_engine.ops.gated_delta.plan import SlotPlan
from minivllm_engine.ops.linear import output_head
from minivllm_engine.ops.operations import AttentionOperations, Decodes, Operations
from minivllm_engine.ops.reference_backend import REFERENCE
from minivllm_engine.ops.sampling import reference as sampling


def _greedy(
    logits: torch.Tensor, *, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    found = sampling.greedy(logits)
    if out is None:
        return found
    for to, tensor in zip(out, found, strict=True):
        to.copy_(tensor)
    return out


def _output_head(
    x: torch.Tensor, embedding: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    logits = output_head(x, embedding)
    return logits if out is None else out.copy_(logits)


def _norm_rotate_write(*args: Any, kv_slots: torch.Tensor, keys: torch.Tensor, **rest: Any) -> Any:
    sink = keys.shape[0] * keys.shape[1] - 1
    slots = kv_slots.long()
    return fused.norm_rotate_write(*args, kv_slots=slots.where(slots >= 0, sink), keys=keys, **rest)


def _attention_plan(batch: ModelInput, shape: KVShape, dtype: torch.dtype) -> AttentionPlan:
    if batch.num_decodes == len(batch.lengths):
        starts = tuple(batch.positions.tolist())
        batch = replace(batch, starts=starts, block_tables=batch.block_tables.long())
    return AttentionPlan.build(batch, shape)


def static_reference(num_slots: int) -> Operations:
    """num_slots: of the pool; the one after them is the sink."""

    def slot_plan(decodes: Decodes) -> SlotPlan:
        slots = decodes.slots.long()
        slots = slots.where(slots >= 0, num_slots)
        return SlotPlan.build(slots, tuple(decodes.positions.tolist()))

    return replace(
        REFERENCE,
        name="static reference",
        static_decode=True,
        greedy=_greedy,
        output_head=_output_head,
        products=replace(REFERENCE.products, output_head=_output_head),
        norm_rotate_write=_norm_rotate_write,
        delta_net=replace(REFERENCE.delta_net, conv_step_plan=slot_plan, step_plan=slot_plan),
        attention=AttentionOperations(_attention_plan, REFERENCE.attention.attend),
    )
