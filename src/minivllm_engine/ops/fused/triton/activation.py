"""SiLU and sigmoid, times what they open."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minivllm_engine.ops.dependent_launch import launch_options

_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(
    gate_up, out, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    if EARLY:
        gdc_launch_dependents()
    if EARLY:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    dtype = out.dtype.element_ty
    gate_at = gate_up + row * row_stride + columns
    gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_at + SIZE, mask=mask, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(out + row * SIZE + columns, (activated * up).to(dtype), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [num_rows, 2 size], which holds gate and up side by side: [num_rows, size]."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    _silu_mul_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
        gate_up,
        out,
        gate_up.stride(0),
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
        **launch_options(None, gate_up.device),
    )
    return out


@triton.jit
def _sigmoid_mul_kernel(
    x, gate, gate_row, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    if EARLY:
        gdc_launch_dependents()
    if EARLY:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    dtype = x.dtype.element_ty
    x_at = x + row * SIZE + columns
    opening = tl.load(gate + row * gate_row + columns, mask=mask, other=0.0).to(tl.float32)
    opening = tl.sigmoid(opening).to(dtype).to(tl.float32)
    numbers = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_at, (numbers * opening).to(dtype), mask=mask)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate), in x's place.

    Args:
        x: [num_rows, ..., size], contiguous.
        gate: of the same shape; rows may lie apart, each is contiguous.
    """
    size = x[0].numel()
    _sigmoid_mul_kernel[(x.shape[0], triton.cdiv(size, _BLOCK))](
        x,
        gate,
        gate.stride(0),
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
        **launch_options(None, x.device),
    )
    return x
