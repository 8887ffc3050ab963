"""The operations of reference.py in Triton, each one kernel. They round where the reference rounds, but for
the rotary embedding, which is rounded once here and three times there.
"""

import torch
import triton
import triton.language as tl

_ACTIVATION_BLOCK = 1024
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
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    numbers = tl.load(x + row * x_row + columns, mask=mask, other=0.0).to(tl.float32)
    factors = tl.load(scale + columns, mask=mask, other=0.0)
    dtype = out.dtype.element_ty
    if HAS_RESIDUAL:
        residual_at = residual + row * residual_row + columns
        total = tl.load(residual_at, mask=mask, other=0.0).to(tl.float32) + numbers
        numbers = total.to(dtype).to(tl.float32)
        tl.store(residual_at, total.to(dtype), mask=mask)
    inverse = tl.rsqrt(tl.sum(numbers * numbers, axis=0) / SIZE + tl.load(eps))
    tl.store(out + row * SIZE + columns, (numbers * inverse * factors).to(dtype), mask=mask)


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """x / rms(x) * scale over the last dimension, in fp32, rounded once at the end.

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
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    at = rows[:, None] * SIZE + columns[None, :]
    gate_at = gate + (rows // HEADS * gate_row + rows % HEADS * SIZE)[:, None] + columns[None, :]
    dtype = out.dtype.element_ty
    numbers = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    gates = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    weights = tl.load(weight + columns, mask=columns < SIZE, other=0.0)
    inverse = tl.rsqrt(tl.sum(numbers * numbers, axis=1) / SIZE + tl.load(eps))
    normed = (numbers * inverse[:, None]).to(dtype).to(tl.float32)
    result = gates * tl.sigmoid(gates) * weights[None, :] * normed
    tl.store(out + at, result.to(dtype), mask=mask)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor
) -> torch.Tensor:
    """(weight * x / rms(x)) * silu(gate) over the last dimension; x / rms(x) is rounded before the weight.

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
    )
    return out


@triton.jit
def _silu_mul_kernel(gate_up, out, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
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
    _silu_mul_kernel[(num_rows, triton.cdiv(size, _ACTIVATION_BLOCK))](
        gate_up, out, gate_up.stride(0), SIZE=size, BLOCK=_ACTIVATION_BLOCK, num_warps=4
    )
    return out


@triton.jit
def _sigmoid_mul_kernel(x, gate, gate_row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
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
    _sigmoid_mul_kernel[(x.shape[0], triton.cdiv(size, _ACTIVATION_BLOCK))](
        x, gate, gate.stride(0), SIZE=size, BLOCK=_ACTIVATION_BLOCK, num_warps=4
    )
    return x


@triton.jit(do_not_specialize_on_alignment=["kv_slots"])
def _rotate_kernel(
    query_key,
    value,
    scale,
    eps,
    cos,
    sin,
    keys,
    values,
    kv_slots,
    out,
    query_key_row,
    value_row,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    mask, rotated = columns < D, columns < 2 * HALF
    dtype = out.dtype.element_ty
    head_at = query_key + token * query_key_row + head * D
    scale_at = scale + head * D
    numbers = tl.load(head_at + columns, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(numbers * numbers, axis=0) / D + tl.load(eps))
    factors = tl.load(scale_at + columns, mask=mask, other=0.0)
    normed = (numbers * inverse * factors).to(dtype).to(tl.float32)

    # The same for the dimension that each is rotated with.
    partner = tl.where(columns < HALF, columns + HALF, columns - HALF)
    others = tl.load(head_at + partner, mask=rotated, other=0.0).to(tl.float32)
    factors = tl.load(scale_at + partner, mask=rotated, other=0.0)
    others = (others * inverse * factors).to(dtype).to(tl.float32)
    angle_at = token * HALF + columns % HALF
    cosine = tl.load(cos + angle_at, mask=rotated, other=1.0).to(tl.float32)
    sine = tl.load(sin + angle_at, mask=rotated, other=0.0).to(tl.float32)
    result = normed * cosine + tl.where(columns < HALF, -others, others) * sine

    if head < H:
        tl.store(out + (token * H + head) * D + columns, result.to(dtype), mask=mask)
    else:
        slot = tl.load(kv_slots + token).to(tl.int64)
        own = tl.load(value + token * value_row + (head - H) * D + columns, mask=mask, other=0.0)
        mask = mask & (slot >= 0)
        at = (slot * G + head - H) * D + columns
        tl.store(keys + at, result.to(dtype), mask=mask)
        tl.store(values + at, own, mask=mask)


def norm_rotate_write(
    query_key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: torch.Tensor,
    eps: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kv_slots: torch.Tensor,
) -> torch.Tensor:
    """Norm and rotate queries and keys, write keys and values into the cache, and return the queries.

    H query heads, G key/value heads, d the head's size.

    Args:
        query_key: [num_tokens, H + G, d]; tokens may lie apart, each is contiguous.
        value: [num_tokens, G, d], likewise.
        scale: [H + G, d] fp32, of the norms.
        eps: [1] fp32, of the norms.
        cos, sin: [num_tokens, 1, rotary_dim / 2], contiguous.
        keys, values: [num_blocks, block_size, G, d], of the dtype of query_key.
        kv_slots: [num_tokens], where in them each token goes: block * block_size + offset; nowhere if
            negative.

    Returns:
        [num_tokens, H, d].
    """
    num_tokens, num_rotated, head_dim = query_key.shape
    num_kv_heads = value.shape[1]
    num_heads = num_rotated - num_kv_heads
    out = query_key.new_empty(num_tokens, num_heads, head_dim)
    _rotate_kernel[(num_tokens, num_rotated)](
        query_key,
        value,
        scale,
        eps,
        cos,
        sin,
        keys,
        values,
        kv_slots,
        out,
        query_key.stride(0),
        value.stride(0),
        H=num_heads,
        G=num_kv_heads,
        D=head_dim,
        HALF=cos.shape[-1],
        BLOCK=triton.next_power_of_2(head_dim),
        num_warps=1,
    )
    return out
