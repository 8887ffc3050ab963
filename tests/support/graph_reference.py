"""The reference operations behind the contract of `Operations.graph_decode`: fast on a CPU, for tests.

Decodes are planned from tensors alone, and lanes with slot -1 are padding: they touch nothing, and give
zeros. So steps of decodes go through `GraphDecode` as they do with the kernels. Chunks of prompts are
planned from their buffers, as they are when a step runs, and rows of no sequence get NaN: they go through
`GraphPrefill`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from minivllm_engine.ops import reference_backend as reference
from minivllm_engine.ops.attention.reference import KVShape
from minivllm_engine.ops.gated_delta.plan import SlotPlan
from minivllm_engine.ops.operations import (
    AttentionOperations,
    Chunks,
    Decodes,
    DeltaInputs,
    DeltaRule,
    Operations,
)
from minivllm_engine.ops.prompt_buffers import PromptBucket
from minivllm_engine.ops.sampling.reference import greedy
from minivllm_engine.tensors.model_input import ModelInput


@dataclass(frozen=True)
class _Lanes:
    """The rows of lanes that are somebody's, or None for all; and a plan for these, or None for no lane."""

    live: torch.Tensor | None
    plan: Any


def _live(slots: torch.Tensor) -> torch.Tensor:
    return (slots >= 0).nonzero().squeeze(1)


def _decode_plan(decodes: Decodes) -> _Lanes:
    live = _live(decodes.slots)
    starts = tuple(decodes.positions[live].tolist())
    slots = decodes.slots[live].long()
    return _Lanes(live, SlotPlan.build(slots, starts) if starts else None)


def _spread(rows: torch.Tensor, live: torch.Tensor, count: int) -> torch.Tensor:
    return rows.new_zeros(count, *rows.shape[1:]).index_copy_(0, live, rows)


def _on_live(
    lanes: _Lanes, like: torch.Tensor, compute: Callable[..., torch.Tensor], *rows: torch.Tensor
) -> torch.Tensor:
    """compute(*rows) for the lanes that are somebody's; zeros, shaped as `like`, for the others."""
    if lanes.plan is None:
        return torch.zeros_like(like)
    if lanes.live is None:
        return compute(*rows)
    return _spread(compute(*(x[lanes.live] for x in rows)), lanes.live, like.shape[0])


@dataclass(frozen=True)
class _OfBucket:
    """A plan that is made anew from buffers whenever it is used."""

    bucket: PromptBucket
    shape: KVShape

    def chunks(self) -> tuple[Chunks, int]:
        """The sequences that are somebody's, and how many rows they have."""
        bucket = self.bucket
        live = int((bucket.slots >= 0).sum())
        bounds = bucket.bounds.tolist()
        lengths = [end - begin for begin, end in pairwise(bounds)]
        assert not any(lengths[live:]), "a lane of nobody has rows"
        assert (bucket.slots[live:] < 0).all()
        starts = tuple(bucket.starts[:live].tolist())
        return Chunks(bucket.slots[:live].long(), starts, tuple(lengths[:live])), bounds[live]

    def attention(self) -> tuple[Any, int]:
        chunks, rows = self.chunks()
        empty = self.bucket.positions[:0]
        batch = ModelInput(
            token_ids=empty,
            positions=self.bucket.positions[:rows].long(),
            starts=chunks.starts,
            lengths=chunks.lengths,
            slots=chunks.slots,
            block_tables=self.bucket.block_tables[: len(chunks.lengths)].long(),
            kv_slots=empty,
            logits_rows=empty,
            num_decodes=0,
        )
        return reference.attention_plan(batch, self.shape, torch.float32), rows


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    out = rows.new_full((count, *rows.shape[1:]), float("nan"))
    out[: len(rows)] = rows
    return out


def _conv_chunks(x: torch.Tensor, pool: torch.Tensor, weights: Any, plan: Any) -> Any:
    if not isinstance(plan, _OfBucket):
        return reference.conv_chunks(x, pool, weights, plan)
    chunks, rows = plan.chunks()
    own = reference.conv_chunk_plan(chunks, weights.conv_weight.shape[0])
    heads = reference.conv_chunks(x[:rows], pool, weights, own)
    return tuple(_padded(part, len(x)) for part in heads)


def _delta_chunks(inputs: DeltaInputs, weights: Any, pool: torch.Tensor, plan: Any) -> torch.Tensor:
    if not isinstance(plan, _OfBucket):
        return reference.delta_chunks(inputs, weights, pool, plan)
    chunks, rows = plan.chunks()
    some = DeltaInputs(*(x[:rows] for x in inputs))
    own = reference.chunk_plan(chunks)
    return _padded(reference.delta_chunks(some, weights, pool, own), len(inputs.v))


def _graph_chunks(bucket: PromptBucket, shape: KVShape, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    return (_OfBucket(bucket, shape),) * 3


def _conv_step(x: torch.Tensor, pool: torch.Tensor, weights: Any, lanes: _Lanes) -> torch.Tensor:
    return _on_live(lanes, x, lambda some: reference.conv_step(some, pool, weights, lanes.plan), x)


def _delta_step(
    inputs: DeltaInputs, weights: Any, pool: torch.Tensor, plan: _Lanes
) -> torch.Tensor:
    def step(*some: torch.Tensor) -> torch.Tensor:
        return reference.delta_step(DeltaInputs(*some), weights, pool, plan.plan)

    return _on_live(plan, inputs.v, step, *inputs)


def _attention_plan(batch: ModelInput, shape: KVShape, dtype: torch.dtype) -> _Lanes:
    if batch.num_decodes < len(batch.lengths):
        return _Lanes(None, reference.attention_plan(batch, shape, dtype))
    live = _live(batch.slots)
    if not len(live):
        return _Lanes(live, None)
    some = replace(
        batch,
        starts=tuple(batch.positions[live].tolist()),
        lengths=(1,) * len(live),
        slots=batch.slots[live],
        block_tables=batch.block_tables[live].long(),
        num_decodes=len(live),
    )
    return _Lanes(live, reference.attention_plan(some, shape, dtype))


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lanes: _Lanes | _OfBucket
) -> torch.Tensor:
    attend = reference.REFERENCE_ATTENTION.attend
    if isinstance(lanes, _OfBucket):
        plan, rows = lanes.attention()
        return _padded(attend(q[:rows], keys, values, plan), len(q))
    return _on_live(lanes, q, lambda some: attend(some, keys, values, lanes.plan), q)


def _norm_rotate_write(query_key, value, *, cos, sin, kv_slots, **rest) -> torch.Tensor:
    live = _live(kv_slots)
    some = {"cos": cos[live], "sin": sin[live], "kv_slots": kv_slots[live].long()}
    out = reference.REFERENCE.norm_rotate_write(query_key[live], value[live], **some, **rest)
    return _spread(out, live, query_key.shape[0])


def _greedy(
    logits: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    found = greedy(logits)
    if out is None:
        return found
    for target, source in zip(out, found, strict=True):
        target.copy_(source)
    return out


def _output_head(
    x: torch.Tensor, embedding: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    logits = reference.REFERENCE.products.output_head(x, embedding)
    return logits if out is None else out.copy_(logits)


def graph_reference() -> Operations:
    """Reference operations with `graph_decode` and `graph_chunks`."""
    base = reference.REFERENCE
    step: DeltaRule = _delta_step
    chunks: DeltaRule = _delta_chunks
    return replace(
        base,
        graph_decode=True,
        products=replace(base.products, output_head=_output_head),
        norm_rotate_write=_norm_rotate_write,
        greedy=_greedy,
        delta_net=replace(
            base.delta_net,
            conv_step=_conv_step,
            conv_step_plan=_decode_plan,
            step=step,
            step_plan=_decode_plan,
            conv_chunks=_conv_chunks,
            chunks=chunks,
        ),
        attention=AttentionOperations(_attention_plan, _attend),
        graph_chunks=_graph_chunks,
    )
