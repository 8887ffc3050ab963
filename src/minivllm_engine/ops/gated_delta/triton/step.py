"""One token for each of many sequences."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minivllm_engine.ops.device import launch_options
from minivllm_engine.ops.gated_delta import tiles
from minivllm_engine.ops.gated_delta.triton.rule import advance, launch, load_token, locate, prepare


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
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    seq, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    decay_of_head, bias_of_head = tl.load(log_decay + head), tl.load(dt_bias + head)
    if EARLY:
        gdc_wait()
    slot = tl.load(slots + seq).to(tl.int64)
    rows, row_mask, state_at, mask = locate(pool, slot, pool_row, head, V, K, ROWS, BLOCK_K)
    out_at = out + (seq * HV + head) * V + rows
    if slot < 0:
        tl.store(out_at, tl.zeros((ROWS,), out.dtype.element_ty), mask=row_mask)
        return
    has_past = tl.load(positions + seq) > 0
    state = tl.load(state_at, mask=mask & has_past, other=0.0).to(tl.float32)

    key_head = head // (HV // H)
    q, k, v = q + key_head * K, k + key_head * K, v + head * V + rows
    query, key, value, a_now, b_now = load_token(
        q, k, v, a + head, b + head, seq, q_row, k_row, v_row, a_row, b_row, row_mask, K, BLOCK_K
    )
    query, key, product, value, decay, beta = prepare(
        query, key, value, a_now, b_now, decay_of_head, bias_of_head, scale
    )
    state, result = advance(state, query, key, product, value, decay, beta)
    tl.store(state_at, state.to(pool.dtype.element_ty), mask=mask)
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
    early: bool | None = None,
) -> torch.Tensor:
    """Take one token for each of N sequences; their states in `pool` are updated in place.

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
        early: start while the kernel before still runs; by default where the card can.

    Returns:
        o [N, HV, V] in v's dtype.
    """
    return launch(
        _step_kernel,
        v.shape[0],
        (slots, positions),
        q,
        k,
        v,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        pool=pool,
        rows=tiles.STEP_ROWS,
        **launch_options(early, v.device),
    )
