"""Root-mean-square norms, and SiLU and sigmoid, times what they open."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minivllm_engine.ops.device import launch_options

# So many rows of a gated norm give the card enough programs, also several rows to each.
_MANY_ROWS = 8192
_ROWS = 8


@triton.jit
def _norm_kernel(
    x,
    residual,
    scale,
    eps,
    out,
    x_row,
    residual_row,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    factors = tl.load(scale + columns, mask=mask, other=0.0)
    epsilon = tl.load(eps)
    if EARLY:
        gdc_wait()
    numbers = tl.load(x + row * x_row + columns, mask=mask, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    if HAS_RESIDUAL:
        residual_at = residual + row * residual_row + columns
        total = tl.load(residual_at, mask=mask, other=0.0).to(tl.float32) + numbers
        numbers = total.to(dtype).to(tl.float32)
        tl.store(residual_at, total.to(dtype), mask=mask)
    inverse = tl.rsqrt(tl.sum(numbers * numbers, axis=0) / SIZE + epsilon)
    tl.store(out + row * SIZE + columns, (numbers * inverse * factors).to(dtype), mask=mask)


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """Compute x / rms(x) * scale over the last dimension, in fp32, rounded once at the end.

    Args:
        x: [num_rows, size]; rows may lie apart, each is contiguous.
        scale: [size] fp32.
        eps: [1] fp32, added to the mean square.
    """
    return _norm(x, x, scale, eps, has_residual=False)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor, eps: torch.Tensor
) -> torch.Tensor:
    """Add x to `residual` in place, rounded, and return the norm of the sum.

    Args:
        x, residual: [num_rows, size], of one dtype; rows may lie apart, each is contiguous.
        scale: [size] fp32.
        eps: [1] fp32.
    """
    return _norm(x, residual, scale, eps, has_residual=True)


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    scale: torch.Tensor,
    eps: torch.Tensor,
    *,
    has_residual: bool,
) -> torch.Tensor:
    num_rows, size = x.shape
    block = triton.next_power_of_2(size)
    out = x.new_empty(num_rows, size)
    _norm_kernel[(num_rows,)](
        x,
        residual,
        scale,
        eps,
        out,
        x.stride(0),
        residual.stride(0),
        SIZE=size,
        BLOCK=block,
        HAS_RESIDUAL=has_residual,
        num_warps=min(max(block // 512, 1), 8),
        **launch_options(None, x.device),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm_kernel(
    x,
    gate,
    weight,
    eps,
    out,
    num_rows,
    gate_row,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    at = rows[:, None] * SIZE + columns[None, :]
    gate_at = gate + (rows // HEADS * gate_row + rows % HEADS * SIZE)[:, None] + columns[None, :]
    dtype = out.dtype.element_ty
    weights = tl.load(weight + columns, mask=columns < SIZE, other=0.0)
    epsilon = tl.load(eps)
    if EARLY:
        gdc_wait()
    numbers = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    gates = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(numbers * numbers, axis=1) / SIZE + epsilon)
    normed = (numbers * inverse[:, None]).to(dtype).to(tl.float32)
    result = gates * tl.sigmoid(gates) * weights[None, :] * normed
    tl.store(out + at, result.to(dtype), mask=mask)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor
) -> torch.Tensor:
    """Compute (weight * x / rms(x)) * silu(gate) over the last dimension, x / rms(x) rounded first.

    Args:
        x: [num_tokens, num_heads, size], contiguous.
        gate: [num_tokens, num_heads, size]; tokens may lie apart, each is contiguous.
        weight: [size] fp32.
        eps: [1] fp32.
    """
    num_tokens, num_heads, size = x.shape
    num_rows = num_tokens * num_heads
    rows = _ROWS if num_rows >= _MANY_ROWS else 1
    block = triton.next_power_of_2(size)
    out = x.new_empty(x.shape)
    _gated_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        gate,
        weight,
        eps,
        out,
        num_rows,
        gate.stride(0),
        HEADS=num_heads,
        SIZE=size,
        BLOCK=block,
        ROWS=rows,
        num_warps=4 if rows > 1 else 1,
        **launch_options(None, x.device),
    )
    return out


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
    """Compute silu(gate) * up [num_rows, size] of [num_rows, 2 size], which holds both side by side."""
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
    """Compute x * sigmoid(gate), in x's place.

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
