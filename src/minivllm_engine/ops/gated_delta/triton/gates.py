"""The gates of the delta rule: how much of a state is kept, and how much of a value is written to it."""

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
    """g, and beta rounded to b's dtype, as fp32."""
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
