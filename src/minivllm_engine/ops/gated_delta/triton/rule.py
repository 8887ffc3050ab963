"""What the kernels of the delta rule share: its gates, and what a token does to rows of a state."""

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), small results too: log(u) e / (u - 1) mends the rounding of u = 1 + e."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    rounded = tl.where(u == 1.0, 1.0, u - 1.0)
    small = tl.where(u == 1.0, e, tl.log(u) * (e / rounded))
    return tl.where(x > 20.0, x, small)


@triton.jit
def gates(a, b, log_decay, dt_bias):
    """Compute g, and beta rounded to b's dtype, as fp32."""
    g = -tl.exp(log_decay.to(tl.float32)) * _softplus(a.to(tl.float32) + dt_bias.to(tl.float32))
    beta = tl.sigmoid(b.to(tl.float32)).to(b.dtype).to(tl.float32)
    return g, beta


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
    log_of_decay, strength = gates(
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
    """Compute the gates that `gated_delta_step` works out for itself, for the chunked form.

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


_NORM_EPS = tl.constexpr(1e-6)


@triton.jit
def _l2norm(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + _NORM_EPS)


@triton.jit
def locate(
    pool,
    slot,
    pool_row,
    head,
    V: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Find this program's rows of a head, which of them are there, where their state lies, what of it."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_K)
    state_at = pool + slot * pool_row + head * (V * K) + rows[:, None] * K + columns[None, :]
    return rows, rows < V, state_at, (rows < V)[:, None] & (columns < K)[None, :]


@triton.jit
def load_token(
    q,
    k,
    v,
    a,
    b,
    row,
    q_row,
    k_row,
    v_row,
    a_row,
    b_row,
    in_rows,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Load what lies in one row of the batch: query and key [BLOCK_K], some rows of the value, and the gates.

    q, k, a and b point at the head in row 0, v at the rows of its value, of which those `in_rows` are there.
    """
    columns = tl.arange(0, BLOCK_K)
    query = tl.load(q + row * q_row + columns, mask=columns < K, other=0.0)
    key = tl.load(k + row * k_row + columns, mask=columns < K, other=0.0)
    value = tl.load(v + row * v_row, mask=in_rows, other=0.0)
    return query, key, value, tl.load(a + row * a_row), tl.load(b + row * b_row)


@triton.jit
def prepare(query, key, value, a, b, log_decay, dt_bias, scale):
    """Give in fp32 of a loaded token: query and key normed, their product, the value, exp(g), beta."""
    g, beta = gates(a, b, log_decay, dt_bias)
    query = _l2norm(query.to(tl.float32)) * scale
    key = _l2norm(key.to(tl.float32))
    return query, key, tl.sum(query * key, axis=0), value.to(tl.float32), tl.exp(g), beta


@triton.jit
def advance(state, query, key, product, value, decay, beta):
    """Give the state [rows, BLOCK_K] after the token, and its output [rows].

    S q after the update is exp(g) (S q) + d (k q): both reads are of the state before, side by side.
    """
    delta = beta * (value - decay * tl.sum(state * key[None, :], axis=1))
    result = decay * tl.sum(state * query[None, :], axis=1) + delta * product
    return decay * state + delta[:, None] * key[None, :], result


def launch(
    kernel: Any,
    num_seqs: int,
    where: tuple[torch.Tensor, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    pool: torch.Tensor,
    rows: int,
    **options: bool,
) -> torch.Tensor:
    """Launch a kernel of one warp for so many rows of V of each head of each sequence: o [N, HV, V].

    where: the kernel's own tensors, which say where the sequences lie. options: of the launch.
    """
    num_tokens, value_heads, value_dim = v.shape
    key_dim = k.shape[2]
    out = v.new_empty(num_tokens, value_heads, value_dim)
    kernel[(triton.cdiv(value_dim, rows), value_heads, num_seqs)](
        q,
        k,
        v,
        a,
        b,
        A_log,
        dt_bias,
        pool,
        out,
        *where,
        *(x.stride(0) for x in (q, k, v, a, b, pool)),
        key_dim**-0.5,
        H=k.shape[1],
        HV=value_heads,
        K=key_dim,
        V=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim),
        ROWS=rows,
        num_warps=1,
        **options,
    )
    return out
