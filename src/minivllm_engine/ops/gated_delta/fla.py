"""The gated delta rule of flash-linear-attention (FLA), chunked and one step, on states that lie in slots.

FLA knows no slots: states are gathered before it and scattered after it. Its public chunked operation
remembers what it worked out for the sequence boundaries by the identity of their tensor, and would take
new ones in an old tensor for the old ones. So its four parts are called one by one, with all of that made
here: a graph can be replayed with other boundaries in the same place.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

from minivllm_engine.core.errors import BackendUnavailable
from minivllm_engine.ops.gated_delta.triton.states import gather_states, scatter_states
from minivllm_engine.ops.varlen import number_parts
from minivllm_engine.tensors.device_copy import cast, fp32, on_device

CHUNK = 64
# FLA's gates are powers of two.
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class _Fla:
    """What is taken of FLA 0.6: the recurrent operation, and the parts of the chunked one in their order."""

    recurrent: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    cumsum: Callable[..., torch.Tensor]
    within_chunks: Callable[..., tuple[torch.Tensor, torch.Tensor, Any]]
    states: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    outputs: Callable[..., torch.Tensor]


@functools.cache
def _fla() -> _Fla:
    """Raises BackendUnavailable where FLA or its Triton is missing, or FLA is of another version."""
    try:
        return _Fla(
            import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule,
            import_module("fla.ops.utils").chunk_local_cumsum,
            import_module("fla.ops.gated_delta_rule.chunk_fwd").chunk_gated_delta_rule_fwd_intra,
            import_module("fla.ops.common.chunk_delta_h").chunk_gated_delta_rule_fwd_h,
            import_module("fla.ops.common.chunk_o").chunk_fwd_o,
        )
    except (ImportError, AttributeError) as error:
        raise BackendUnavailable(
            "flash-linear-attention 0.6, which prompts need on a GPU, is not installed",
            why=f"importing fla.ops.gated_delta_rule: {error}",
            hint="pip install 'flash-linear-attention>=0.6,<0.7'",
        ) from error


@dataclass(frozen=True, slots=True)
class FlaChunkPlan:
    """Some packed sequences, and where their states lie: the same for all layers of a step.

    All are tensors of integers on the device, which may be refilled.

    Attributes:
        slots: [num_seqs]; negative ones are padding, without rows. No others are alike, but for the sink's.
        starts: [num_seqs], tokens that the state of each has seen. 0 means that it is zero.
        bounds: [num_seqs + 1], the first row of each sequence, and one past the last row.
        chunks: [num_chunks, 2], sequence and number of each chunk of 64 tokens, in order; then any that are
            beyond the end of a sequence.
        chunk_offsets: [num_seqs + 1], the first chunk of each sequence, and one past the last.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    bounds: torch.Tensor
    chunks: torch.Tensor
    chunk_offsets: torch.Tensor

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
        _fla()
        before, new = np.array(starts), np.array(lengths)
        chunks = number_parts(new, CHUNK)
        parts = [before, np.cumsum((0, *lengths)), chunks.ravel()]
        parts.append(np.cumsum((0, *-(-new // CHUNK))))
        # FLA's kernels are compiled anew for pointers that are aligned in another way.
        padded = [np.pad(part, (0, -len(part) % 4)) for part in parts]
        packed = on_device(np.concatenate(padded), torch.int32, slots.device)
        apart = packed.split_with_sizes([len(part) for part in padded])
        first, bounds, pairs, offsets = (
            some[: len(part)] for some, part in zip(apart, parts, strict=True)
        )
        return cls(slots, first, bounds, pairs.view(-1, 2), offsets)


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
        q, k: [num_tokens, H, K], contiguous, of norm 1 over K, which is at most 256.
        v: [num_tokens, HV, V], contiguous.
        g: [num_tokens, HV] fp32, log of the decay, at most 0.
        beta: [num_tokens, HV].
        pool: [num_slots, HV, V, K], the states; those of the plan's slots are advanced.
        plan: made for this step and these sequences.

    Returns:
        o [num_tokens, HV, V] in v's dtype; rows of no sequence are undefined.
    """
    fla = _fla()
    where = {"cu_seqlens": plan.bounds, "chunk_indices": plan.chunks}
    q, k, v, g, beta = (x.unsqueeze(0) for x in (q, k, v, g, beta))
    decay = fla.cumsum(fp32(g), chunk_size=CHUNK, scale=_LOG2_E, **where)
    w, u, _ = fla.within_chunks(k=k, v=v, g=decay, beta=beta, chunk_size=CHUNK, **where)
    states, values, final = fla.states(
        k=k,
        w=w,
        u=u,
        g=decay,
        initial_state=gather_states(pool, plan.slots, plan.starts),
        output_final_state=True,
        state_v_first=True,
        chunk_size=CHUNK,
        chunk_offsets=plan.chunk_offsets,
        **where,
    )
    scatter_states(final, pool, plan.slots)
    out = fla.outputs(
        q=q,
        k=k,
        v=values,
        h=states,
        g=decay,
        scale=k.shape[-1] ** -0.5,
        state_v_first=True,
        chunk_size=CHUNK,
        **where,
    )
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
    padding = slots < 0
    places = slots.masked_fill(padding, pool.shape[0] - 1).long()
    begins = (positions <= 0).view(-1, 1, 1, 1)
    out, final = _fla().recurrent(
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
