"""The gated delta rule of flash-linear-attention (FLA), chunked and one step, on states that lie in slots.

FLA knows no slots: states are gathered before it and scattered after it. For chunks it remembers what it
worked out for the sequence boundaries by the identity of their tensor, so a plan, with boundaries of its
own, is made anew for each step and never refilled.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate

import torch

from minivllm_engine.core.errors import BackendUnavailable
from minivllm_engine.tensors.device_copy import cast, fp32, on_device

Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@functools.cache
def _rules() -> tuple[Rule, Rule]:
    """FLA's chunked and recurrent operation. Raises BackendUnavailable where FLA or its Triton is missing."""
    try:
        module = import_module("fla.ops.gated_delta_rule")
    except ImportError as error:
        raise BackendUnavailable(
            "flash-linear-attention, which prompts need on a GPU, is not installed",
            why=f"importing fla.ops.gated_delta_rule: {error}",
            hint="pip install 'flash-linear-attention>=0.6,<1'",
        ) from error
    return module.chunk_gated_delta_rule, module.fused_recurrent_gated_delta_rule


@dataclass(frozen=True, slots=True)
class FlaChunkPlan:
    """Some packed sequences, and where their states lie: the same for all layers of a step.

    Attributes:
        slots: [num_seqs] int64, no two alike.
        fresh: [num_fresh] int64, which of the sequences begin here, so that their state is zero.
        bounds: [num_seqs + 1] int32, the first row of each sequence, and one past the last row.
        bounds_on_host: the same on the CPU, which spares FLA a wait for the device.
    """

    slots: torch.Tensor
    fresh: torch.Tensor
    bounds: torch.Tensor
    bounds_on_host: torch.Tensor

    @classmethod
    def build(
        cls, slots: torch.Tensor, starts: tuple[int, ...], lengths: tuple[int, ...]
    ) -> "FlaChunkPlan":
        """Plan the next tokens of some sequences. Raises BackendUnavailable where FLA is missing.

        Args:
            slots: [num_seqs], no two alike.
            starts: tokens of each sequence that its state has seen. 0 means that its state is zero.
            lengths: tokens of each, in the order of the rows.
        """
        _rules()
        bounds = list(accumulate(lengths, initial=0))
        fresh = [seq for seq, start in enumerate(starts) if start == 0]
        device = slots.device
        return cls(
            slots,
            on_device(fresh, torch.int64, device),
            on_device(bounds, torch.int32, device),
            torch.tensor(bounds, dtype=torch.int32),
        )


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    pool: torch.Tensor,
    plan: FlaChunkPlan,
) -> torch.Tensor:
    """Compute the gated delta rule over packed sequences, in chunks of 64. To be called in inference mode.

    Args:
        q, k: [num_tokens, H, K], raw: FLA normalises them. K is at most 256.
        v: [num_tokens, HV, V].
        g: [num_tokens, HV], log of the decay, at most 0.
        beta: [num_tokens, HV].
        pool: [num_slots, HV, V, K], the states; those of the plan's slots are advanced.
        plan: made for this step and these sequences.

    Returns:
        o [num_tokens, HV, V] in v's dtype.
    """
    states = fp32(pool.index_select(0, plan.slots)).index_fill_(0, plan.fresh, 0)
    chunk_rule, _ = _rules()
    out, final = chunk_rule(
        q.unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        fp32(g).unsqueeze(0),
        beta.unsqueeze(0),
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        state_v_first=True,
        cu_seqlens=plan.bounds,
        cu_seqlens_cpu=plan.bounds_on_host,
    )
    pool.index_copy_(0, plan.slots, cast(final, pool.dtype))
    return out.squeeze(0)


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
    """Take one token for each of N sequences. To be called in inference mode; waits for nothing.

    Takes what the Triton kernel takes, but moves each state three times: out of its slot, through FLA's
    kernel and back. FLA does not round beta to the dtype of b.

    Args:
        q, k: [N, H, K], raw: FLA normalises them.
        v: [N, HV, V].
        a, b: [N, HV], raw gates: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b).
        A_log, dt_bias: [HV].
        pool: [num_slots, HV, V, K], the last of which is the sink, whose content is undefined.
        slots: [N] integers. Negative ones are padding: they take the sink, and their output is zero.
            No others may be alike, but for the sink's.
        positions: [N] integers. At 0 a sequence begins: its state is zero, whatever the slot holds.

    Returns:
        o [N, HV, V] in v's dtype. Raises BackendUnavailable where FLA is missing.
    """
    _, recurrent_rule = _rules()
    padding = slots < 0
    places = slots.masked_fill(padding, pool.shape[0] - 1).long()
    begins = (positions <= 0).view(-1, 1, 1, 1)
    out, final = recurrent_rule(
        q.unsqueeze(1),
        k.unsqueeze(1),
        v.unsqueeze(1),
        g=a.unsqueeze(1),
        beta=b.unsqueeze(1),
        initial_state=pool.index_select(0, places).masked_fill_(begins, 0),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True,
        state_v_first=True,
    )
    pool.index_copy_(0, places, cast(final, pool.dtype))
    return out.squeeze(1).masked_fill_(padding.view(-1, 1, 1), 0)
