"""Is the output head a copy of the embedding? Decided by their values."""

from pathlib import Path

import torch

from minivllm_engine.checkpoint.safetensors_header import TensorEntry
from minivllm_engine.conversion.plan import Plan
from minivllm_engine.conversion.planning import heads_in_question, plan_with_own_head
from minivllm_engine.conversion.progress import Callback, Counter
from minivllm_engine.conversion.reading import TensorReader

_CHUNK_BYTES = 1 << 26


def same_values(
    head: TensorEntry, embedding: TensorEntry, reader: TensorReader, progress: Callback | None
) -> bool:
    """Compare two tensors value by value, some rows at a time; types may differ."""
    if head.shape != embedding.shape:
        return False
    counter = Counter(progress, "compare", 1, head.num_bytes + embedding.num_bytes)
    row_bytes = max(1, (head.num_bytes + embedding.num_bytes) // max(1, head.shape[0]))
    step = max(1, _CHUNK_BYTES // row_bytes)
    for start in range(0, head.shape[0], step):
        rows = (start, min(start + step, head.shape[0]))
        first, second = reader.read(head, rows), reader.read(embedding, rows)
        if first.dtype != second.dtype:
            first, second = first.double(), second.double()
        if not torch.equal(first, second):
            return False
        counter.advance((rows[1] - rows[0]) * row_bytes)
    return True


def settle_head(plan: Plan, dst: Path, reader: TensorReader, progress: Callback | None) -> Plan:
    """The plan, or where the head that it drops is not the embedding, the one that keeps both."""
    if all(same_values(*pair, reader, progress) for pair in heads_in_question(plan)):
        return plan
    return plan_with_own_head(plan, dst)
