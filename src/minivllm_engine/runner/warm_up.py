"""Prompts that nobody asked for, so that their kernels are compiled and tuned before somebody waits."""

from collections.abc import Callable

import torch

from minivllm_engine.models.miniqwen import MiniQwenForCausalLM
from minivllm_engine.tensors.cache_pool import CachePool
from minivllm_engine.tensors.model_input import ModelInput

# Kernels are compiled anew for one sequence and for several, and tuned anew by classes of length.
_LENGTHS = ((64,), (7, 9), (512,), (300, 212), (2048,))


@torch.inference_mode()
def warm_up_prompts(
    model: MiniQwenForCausalLM,
    pool: CachePool,
    max_tokens: int,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Compute prompts of several lengths, the longest of `max_tokens`, in the sinks of the pool."""
    wanted: list[tuple[int, ...]] = [lengths for lengths in _LENGTHS if sum(lengths) < max_tokens]
    wanted.append((max_tokens,))
    if max_tokens >= 1024:
        wanted += [(max_tokens // 8,) * 8, (max_tokens // 8 - 64,) * 8 + (64,) * 8]
    for done, lengths in enumerate(wanted):
        if progress is not None:
            progress(done, len(wanted))
        for decodes in (0, 1):
            batch = _sink_batch(pool, (1,) * decodes + lengths, decodes)
            model(batch, pool)


def _sink_batch(pool: CachePool, lengths: tuple[int, ...], num_decodes: int) -> ModelInput:
    """Prompts whose states and KV all go to the sinks, over each other."""
    num_tokens = sum(lengths)

    def filled(*shape: int, value: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int64, device=pool.device)

    blocks = -(-max(lengths) // pool.block_size)
    positions = torch.cat([torch.arange(n, device=pool.device) for n in lengths])
    return ModelInput(
        token_ids=filled(num_tokens, value=0),
        positions=positions,
        starts=(0,) * len(lengths),
        lengths=lengths,
        slots=filled(len(lengths), value=pool.sink_slot),
        block_tables=filled(len(lengths), blocks, value=pool.sink_block),
        kv_slots=pool.sink_block * pool.block_size + positions % pool.block_size,
        logits_rows=torch.arange(len(lengths), device=pool.device),
        num_decodes=num_decodes,
    )
