"""States out of their slots, and back: for a rule that knows no slots."""

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit(do_not_specialize_on_alignment=["slots", "starts"])
def _gather_kernel(pool, states, slots, starts, pool_row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    seq = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + seq).to(tl.int64)
    has_past = (slot >= 0) & (tl.load(starts + seq) > 0)
    numbers = tl.load(pool + slot * pool_row + at, mask=(at < SIZE) & has_past, other=0.0)
    tl.store(states + seq * SIZE + at, numbers.to(tl.float32), mask=at < SIZE)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _scatter_kernel(states, pool, slots, pool_row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    seq = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + seq).to(tl.int64)
    if slot < 0:
        return
    numbers = tl.load(states + seq * SIZE + at, mask=at < SIZE, other=0.0)
    tl.store(pool + slot * pool_row + at, numbers.to(pool.dtype.element_ty), mask=at < SIZE)


def gather_states(pool: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Copy the states of some sequences out of their slots.

    Args:
        pool: [num_slots, HV, V, K].
        slots: [num_seqs] integers; negative ones are padding.
        starts: [num_seqs] integers, tokens that came before.

    Returns:
        [num_seqs, HV, V, K] fp32: zero where nothing came before, and for padding.
    """
    size = pool[0].numel()
    states = torch.empty(slots.shape[0], *pool.shape[1:], dtype=torch.float32, device=pool.device)
    grid = (triton.cdiv(size, _BLOCK), slots.shape[0])
    _gather_kernel[grid](
        pool, states, slots, starts, pool.stride(0), SIZE=size, BLOCK=_BLOCK, num_warps=4
    )
    return states


def scatter_states(states: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> None:
    """Copy states [num_seqs, HV, V, K] into their slots of `pool`, those of padding nowhere."""
    size = pool[0].numel()
    grid = (triton.cdiv(size, _BLOCK), slots.shape[0])
    _scatter_kernel[grid](states, pool, slots, pool.stride(0), SIZE=size, BLOCK=_BLOCK, num_warps=4)
