"""What one token does to some rows of one head's state: what the kernels of the delta rule have in common."""

from typing import Any

import torch
import triton
import triton.language as tl

from minivllm_engine.ops.gated_delta.triton.gates import gates

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
    """This program's rows of a head, which of them are there, where their state lies, and what of it."""
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
    """What lies in one row of the batch: query and key [BLOCK_K], some rows of the value, and the gates.

    q, k, a and b point at the head in row 0, v at the rows of its value, of which those `in_rows` are there.
    """
    columns = tl.arange(0, BLOCK_K)
    query = tl.load(q + row * q_row + columns, mask=columns < K, other=0.0)
    key = tl.load(k + row * k_row + columns, mask=columns < K, other=0.0)
    value = tl.load(v + row * v_row, mask=in_rows, other=0.0)
    return query, key, value, tl.load(a + row * a_row), tl.load(b + row * b_row)


@triton.jit
def prepare(query, key, value, a, b, log_decay, dt_bias, scale):
    """From what `load_token` gives, in fp32: query and key normed, their product, the value, exp(g), beta."""
    g, beta = gates(a, b, log_decay, dt_bias)
    query = _l2norm(query.to(tl.float32)) * scale
    key = _l2norm(key.to(tl.float32))
    return query, key, tl.sum(query * key, axis=0), value.to(tl.float32), tl.exp(g), beta


@triton.jit
def advance(state, query, key, product, value, decay, beta):
    """The state [rows, BLOCK_K] after the token, and its output [rows].

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
