"""Paged attention: prompts, chunks and decodes of one batch, and decodes whose keys are split."""

import random
from dataclasses import dataclass, replace
from itertools import takewhile

import torch

from minivllm_engine.ops.attention import reference
from minivllm_engine.ops.attention.reference import KVShape
from minivllm_engine.ops.attention.triton import TritonAttentionPlan, paged_attention
from minivllm_engine.tensors.model_input import ModelInput
from support.kernel_checks import NAN, assert_close, on_device, random_rows, same_bits, with_padding


@dataclass(frozen=True)
class Case:
    """A batch over a cache in which all but its sequences' keys and values is NaN."""

    shape: KVShape
    batch: ModelInput
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def make_case(shape: KVShape, spans: list[tuple[int, int]], dtype: torch.dtype) -> Case:
    """spans: (tokens that came before, new tokens) of each sequence; the first with one are decodes."""
    torch.manual_seed(len(spans) + shape.head_dim)
    rng = random.Random(len(spans))
    size = shape.block_size
    counts = [-(-(start + length) // size) for start, length in spans]
    free = list(range(sum(counts) + 4))
    rng.shuffle(free)
    sink = free.pop()
    tables = [[free.pop() for _ in range(count)] for count in counts]
    cache_shape = (sum(counts) + 4, size, shape.num_kv_heads, shape.head_dim)
    keys, values = (torch.full(cache_shape, NAN, dtype=dtype) for _ in range(2))
    for table, (start, length) in zip(tables, spans, strict=True):
        for i, block in enumerate(table):
            filled = min(size, start + length - i * size)
            for cache in (keys, values):
                cache[block, :filled] = torch.randn(filled, *cache_shape[2:]).to(dtype)
    starts, lengths = zip(*spans, strict=True)
    (q,) = random_rows(sum(lengths), shape.num_heads * shape.head_dim, dtype=dtype)
    positions = [p for start, length in spans for p in range(start, start + length)]
    widest = max(counts) + 1
    batch = ModelInput(
        token_ids=torch.zeros(0),
        positions=torch.tensor(positions),
        starts=starts,
        lengths=lengths,
        slots=torch.arange(len(spans)),
        block_tables=torch.tensor([[*table, *[sink] * (widest - len(table))] for table in tables]),
        kv_slots=torch.zeros(0),
        logits_rows=torch.zeros(0),
        num_decodes=len(list(takewhile(lambda length: length == 1, lengths))),
    )
    return Case(shape, batch, q, keys, values)


def batch_on(case: Case, device: torch.device) -> ModelInput:
    """The batch of a case with what attention reads of it on the device."""
    names = ("positions", "slots", "block_tables")
    return replace(case.batch, **{name: getattr(case.batch, name).to(device) for name in names})


def run(case: Case, device: torch.device, splits: int | None = None) -> torch.Tensor:
    plan = TritonAttentionPlan.build(batch_on(case, device), case.shape, case.q.dtype)
    if plan.prefill is not None:
        plan = replace(plan, prefill=with_padding(plan.prefill))
    if splits is not None:
        plan = replace(plan, num_splits=splits)
    q = on_device(case.q, device).unflatten(1, (case.shape.num_heads, -1))
    return paged_attention(q, case.keys.to(device), case.values.to(device), plan)


def check(
    device: torch.device,
    dtype: torch.dtype,
    shape: KVShape,
    spans: list[tuple[int, int]],
    splits: int | None = None,
) -> None:
    """splits: among how many programs the keys of a decode are split, if not what the plan says."""
    case = make_case(shape, spans, dtype)
    assert_close(run(case, device, splits), expected_of(case), f"attention over {spans}")


def expected_of(case: Case) -> torch.Tensor:
    """What the reference gives."""
    plan = reference.ReferenceAttentionPlan.build(case.batch, case.shape)
    return reference.paged_attention(queries_of(case), case.keys, case.values, plan)


def queries_of(case: Case) -> torch.Tensor:
    return case.q.unflatten(1, (case.shape.num_heads, -1))


def check_padding(device: torch.device, dtype: torch.dtype, shape: KVShape) -> None:
    """Decodes with padding lanes, which read the sink at position 0, are the same without them."""
    case = make_case(shape, [(40, 1), (299, 1), (0, 1)], dtype)
    alone = run(case, device, splits=4)
    batch = case.batch
    sink = batch.block_tables[0, -1]
    padded = replace(
        batch,
        positions=torch.cat((batch.positions, torch.zeros(2, dtype=torch.int64))),
        starts=(*batch.starts, 0, 0),
        lengths=(*batch.lengths, 1, 1),
        slots=torch.arange(5),
        block_tables=torch.cat((batch.block_tables, sink.expand(2, batch.block_tables.shape[1]))),
        num_decodes=5,
    )
    (q,) = random_rows(5, case.q.shape[1], dtype=dtype)
    q[:3] = case.q
    out = run(replace(case, batch=padded, q=q), device, splits=4)
    assert same_bits(out[:3], alone)
    assert alone.isfinite().all() and out[3:].isnan().all()
