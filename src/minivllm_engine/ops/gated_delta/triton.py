"""One step of the gated delta rule in Triton: states are updated in place, each read and written once.

    S <- exp(g) S;  d = beta (v - S k);  S <- S + d k^T;  o = S q

Letters and layouts as in reference.py. The gates, the norms of q and k and the choice of the slot are
inside the kernel, which so is the only one between the convolution and the output's norm.
"""

import torch
import triton
import triton.language as tl

_NORM_EPS = tl.constexpr(1e-6)
# Rows of V of a program. A state's rows do not depend on each other; with few of them in a program of one
# warp, all loads are in flight before the first is used.
_ROWS = 8


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), small results too: log(u) e / (u - 1) mends the rounding of u = 1 + e."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    rounded = tl.where(u == 1.0, 1.0, u - 1.0)
    small = tl.where(u == 1.0, e, tl.log(u) * (e / rounded))
    return tl.where(x > 20.0, x, small)


@triton.jit
def _gates(a, b, log_decay, dt_bias):
    """g, and beta rounded to b's dtype, as fp32."""
    g = -tl.exp(log_decay.to(tl.float32)) * _softplus(a.to(tl.float32) + dt_bias.to(tl.float32))
    beta = tl.sigmoid(b.to(tl.float32)).to(b.dtype).to(tl.float32)
    return g, beta


@triton.jit
def _l2norm(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + _NORM_EPS)


@triton.jit(do_not_specialize_on_alignment=["a", "b", "slots", "positions"])
def _step_kernel(
    q,
    k,
    v,
    a,
    b,
    log_decay,
    dt_bias,
    pool,
    out,
    slots,
    positions,
    q_row,
    k_row,
    v_row,
    a_row,
    b_row,
    pool_row,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
):
    seq = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_K)
    row_mask, column_mask = rows < V, columns < K
    out_at = out + (seq * HV + head) * V + rows
    slot = tl.load(slots + seq).to(tl.int64)
    if slot < 0:
        tl.store(out_at, tl.zeros((ROWS,), out.dtype.element_ty), mask=row_mask)
        return
    has_past = tl.load(positions + seq) > 0
    state_at = pool + slot * pool_row + head * (V * K) + rows[:, None] * K + columns[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    state = tl.load(state_at, mask=mask & has_past, other=0.0).to(tl.float32)

    key_head = head // (HV // H)
    k_at, q_at = k + seq * k_row + key_head * K, q + seq * q_row + key_head * K
    key = _l2norm(tl.load(k_at + columns, mask=column_mask, other=0.0).to(tl.float32))
    query = _l2norm(tl.load(q_at + columns, mask=column_mask, other=0.0).to(tl.float32)) * scale
    value_at = v + seq * v_row + head * V + rows
    value = tl.load(value_at, mask=row_mask, other=0.0).to(tl.float32)
    g, beta = _gates(
        tl.load(a + seq * a_row + head),
        tl.load(b + seq * b_row + head),
        tl.load(log_decay + head),
        tl.load(dt_bias + head),
    )

    state *= tl.exp(g)
    delta = beta * (value - tl.sum(state * key[None, :], axis=1))
    state += delta[:, None] * key[None, :]
    tl.store(state_at, state.to(pool.dtype.element_ty), mask=mask)
    result = tl.sum(state * query[None, :], axis=1)
    tl.store(out_at, result.to(out.dtype.element_ty), mask=row_mask)


def gated_delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """One token for each of N sequences; their states in `pool` are updated in place.

    Rows of q, k, v, a and b may lie apart, as parts of wider rows; each row is contiguous.

    Args:
        q, k: [N, H, K], raw: they are normalised here. K is at most 256.
        v: [N, HV, V].
        a, b: [N, HV], raw gates: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b).
        A_log, dt_bias: [HV].
        pool: [num_slots, HV, V, K], fp32 or bf16.
        slots: [N] integers. Negative ones are padding: they touch no state, and their output is zero.
            No others may be alike, except that of a sink, whose content is then undefined.
        positions: [N] integers. At 0 a sequence begins: its state is zero, whatever the slot holds.

    Returns:
        o [N, HV, V] in v's dtype.
    """
    num_seqs, heads, key_dim = k.shape
    value_heads, value_dim = v.shape[1:]
    out = v.new_empty(num_seqs, value_heads, value_dim)
    _step_kernel[(triton.cdiv(value_dim, _ROWS), value_heads, num_seqs)](
        q,
        k,
        v,
        a,
        b,
        A_log,
        dt_bias,
        pool,
        out,
        slots,
        positions,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        a.stride(0),
        b.stride(0),
        pool.stride(0),
        key_dim**-0.5,
        H=heads,
        HV=value_heads,
        K=key_dim,
        V=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim),
        ROWS=_ROWS,
        num_warps=1,
    )
    return out


@triton.jit(
    do_not_specialize=["num_numbers"], do_not_specialize_on_alignment=["a", "b", "g", "beta"]
)
def _gates_kernel(
    a,
    b,
    log_decay,
    dt_bias,
    g,
    beta,
    a_row,
    b_row,
    num_numbers,
    HV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_numbers
    row, head = at // HV, at % HV
    log_of_decay, strength = _gates(
        tl.load(a + row * a_row + head, mask=mask, other=0.0),
        tl.load(b + row * b_row + head, mask=mask, other=0.0),
        tl.load(log_decay + head, mask=mask, other=0.0),
        tl.load(dt_bias + head, mask=mask, other=0.0),
    )
    tl.store(g + at, log_of_decay, mask=mask)
    tl.store(beta + at, strength.to(beta.dtype.element_ty), mask=mask)


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gates that `gated_delta_step` works out for itself, for the chunked form.

    Args:
        a, b: [num_tokens, HV]; rows may lie apart, each is contiguous.
        A_log, dt_bias: [HV].

    Returns:
        g [num_tokens, HV] fp32, and beta [num_tokens, HV] in b's dtype.
    """
    g = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    beta = b.new_empty(b.shape)
    block = 256
    _gates_kernel[(triton.cdiv(a.numel(), block),)](
        a,
        b,
        A_log,
        dt_bias,
        g,
        beta,
        a.stride(0),
        b.stride(0),
        a.numel(),
        HV=a.shape[1],
        BLOCK=block,
        num_warps=2,
    )
    return g, beta
