"""What one token does to some rows of one head's state: what the kernels of the delta rule have in common."""

import triton
import triton.language as tl

from minivllm_engine.ops.gated_delta.triton.gates import gates

_NORM_EPS = tl.constexpr(1e-6)


@triton.jit
def _l2norm(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + _NORM_EPS)


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
    """From what `load_token` gives: query and key normed, the value, exp(g) and beta, all in fp32."""
    g, beta = gates(a, b, log_decay, dt_bias)
    query = _l2norm(query.to(tl.float32)) * scale
    return query, _l2norm(key.to(tl.float32)), value.to(tl.float32), tl.exp(g), beta


@triton.jit
def advance(state, query, key, value, decay, beta):
    """The state [rows, BLOCK_K] after the token, and its output [rows]."""
    state *= decay
    delta = beta * (value - tl.sum(state * key[None, :], axis=1))
    state += delta[:, None] * key[None, :]
    return state, tl.sum(state * query[None, :], axis=1)
