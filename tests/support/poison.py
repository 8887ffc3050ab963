"""NaN in all memory that means nothing at the moment: whoever reads it is found out."""

import torch

from minivllm_engine import LLM

NAN = float("nan")


def poison_free_memory(llm: LLM) -> None:
    """Overwrite every block, slot and snapshot that no request, no step in flight and no cache holds."""
    pool, scheduler = llm._loop.runner.pool, llm._scheduler
    kept_blocks = {node.block for node in llm._cache.walk()}
    kept_snapshots = {node.snapshot for node in llm._cache.walk()} | llm._cache.states._reserved
    kept_slots = set()
    for request in scheduler.running:
        kept_blocks.update(request.block_table)
        kept_slots.add(request.slot)
    _poison([*pool.keys, *pool.values], kept_blocks)
    _poison([*pool.conv, *pool.recurrent], kept_slots)
    _poison([*pool.conv_snapshots, *pool.recurrent_snapshots], kept_snapshots)


def _poison(tensors: list[torch.Tensor], kept: set) -> None:
    for tensor in tensors:
        rows = [i for i in range(tensor.shape[0]) if i not in kept]
        tensor[rows] = NAN
