"""A few tokens for each of some sequences: in a short chunk, one after the other is the fastest way.

The chunked form costs a card little, but the host many launches a layer; this is one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl

from minivllm_engine.ops.gated_delta import tiles
from minivllm_engine.ops.gated_delta.triton.rule import advance, launch, load_token, locate, prepare
from minivllm_engine.tensors.device_copy import on_device


@dataclass(frozen=True, slots=True)
class RecurrentPlan:
    """Some packed sequences, and where their states lie: the same for all layers of a step.

    `starts` and `bounds` are those of a `PackedSequences` too, so that a step needs only one of them.

    Attributes:
        slots: [num_seqs] integers. Negative ones are padding: they touch no state, and no output.
            No others may be alike, except that of a sink, whose content is then undefined.
        starts: [num_seqs] integers, tokens of each sequence that its state has seen. 0 means that its
            state is zero, whatever the slot holds.
        bounds: [num_seqs + 1] integers, the first row of each sequence, and one past the last row.
            A sequence of no rows is left alone.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    bounds: torch.Tensor

    @classmethod
    def build(
        cls, slots: torch.Tensor, starts: Sequence[int], lengths: Sequence[int]
    ) -> "RecurrentPlan":
        """Plan the next tokens of some sequences.

        Args:
            slots: [num_seqs], on the device.
            starts: tokens of each sequence that its state has seen.
            lengths: tokens of each, in the order of the rows.
        """
        numbers = [*starts, *accumulate(lengths, initial=0)]
        parts = on_device(numbers, torch.int32, slots.device).split_with_sizes(
            [len(starts), len(lengths) + 1]
        )
        return cls(slots, *parts)


@triton.jit(do_not_specialize_on_alignment=["a", "b", "slots", "starts", "bounds"])
def _recurrent_kernel(
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
    starts,
    bounds,
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
    seq, head = tl.program_id(2), tl.program_id(1)
    slot = tl.load(slots + seq).to(tl.int64)
    begin = tl.load(bounds + seq).to(tl.int64)
    last = tl.load(bounds + seq + 1).to(tl.int64) - 1
    if (slot < 0) | (last < begin):
        return
    rows, row_mask, state_at, mask = locate(pool, slot, pool_row, head, V, K, ROWS, BLOCK_K)
    has_past = tl.load(starts + seq) > 0
    state = tl.load(state_at, mask=mask & has_past, other=0.0).to(tl.float32)

    key_head = head // (HV // H)
    q, k, v = q + key_head * K, k + key_head * K, v + head * V + rows
    a, b, out = a + head, b + head, out + head * V + rows
    decay_of_head, bias_of_head = tl.load(log_decay + head), tl.load(dt_bias + head)
    # Each token is loaded two before its turn and made ready one before it: neither waits for the state.
    query, key, value, a_now, b_now = load_token(
        q, k, v, a, b, begin, q_row, k_row, v_row, a_row, b_row, row_mask, K, BLOCK_K
    )
    query, key, product, value, decay, beta = prepare(
        query, key, value, a_now, b_now, decay_of_head, bias_of_head, scale
    )
    at = tl.minimum(begin + 1, last)
    next_query, next_key, next_value, a_now, b_now = load_token(
        q, k, v, a, b, at, q_row, k_row, v_row, a_row, b_row, row_mask, K, BLOCK_K
    )
    for row in range(begin, last + 1):
        at = tl.minimum(row + 2, last)
        coming = load_token(
            q, k, v, a, b, at, q_row, k_row, v_row, a_row, b_row, row_mask, K, BLOCK_K
        )
        # Before the state advances, so that the two are done side by side.
        ready = prepare(
            next_query, next_key, next_value, a_now, b_now, decay_of_head, bias_of_head, scale
        )
        next_query, next_key, next_value, a_now, b_now = coming
        state, result = advance(state, query, key, product, value, decay, beta)
        tl.store(out + row * (HV * V), result.to(out.dtype.element_ty), mask=row_mask)
        query, key, product, value, decay, beta = ready
    tl.store(state_at, state.to(pool.dtype.element_ty), mask=mask)


def gated_delta_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    pool: torch.Tensor,
    plan: RecurrentPlan,
) -> torch.Tensor:
    """Compute the gated delta rule over packed sequences, token by token: for chunks of some 64 tokens.

    Args: as for `gated_delta_step`, with rows of tokens that lie in `plan.bounds`.

    Returns:
        o [num_tokens, HV, V] in v's dtype; rows of no sequence are undefined.
    """
    return launch(
        _recurrent_kernel,
        plan.slots.shape[0],
        (plan.slots, plan.starts, plan.bounds),
        q,
        k,
        v,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        pool=pool,
        rows=tiles.recurrent_rows(plan.slots.shape[0]),
    )
