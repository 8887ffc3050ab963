"""The parts of FLA 0.6's chunked gated delta rule, in plain PyTorch: FLA itself needs a card.

They take what FLA's take, read sequences and chunks from the same tensors, and leave NaN where FLA leaves
what was in memory.
"""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from minivllm_engine.ops.gated_delta import fla

CHUNK = 64


def _rows(
    cu_seqlens: torch.Tensor, chunk_indices: torch.Tensor
) -> Iterator[tuple[int, int, slice]]:
    """Each chunk that is inside a sequence: its place in the list, its sequence, and its rows."""
    bounds = cu_seqlens.tolist()
    for place, (seq, number) in enumerate(chunk_indices.tolist()):
        first = bounds[seq] + number * CHUNK
        last = min(first + CHUNK, bounds[seq + 1])
        if first < last:
            yield place, seq, slice(first, last)


def cumsum(g, *, chunk_size, scale, cu_seqlens, chunk_indices):
    assert chunk_size == CHUNK and g.dtype == torch.float32
    out = torch.full_like(g, float("nan"))
    for _, _, rows in _rows(cu_seqlens, chunk_indices):
        out[:, rows] = g[:, rows].cumsum(1) * scale
    return out


def _by_head(x: torch.Tensor, rows: slice, group: int = 1) -> torch.Tensor:
    """[HV, T, ...] of [1, num_tokens, H, ...]."""
    return x[0, rows].float().repeat_interleave(group, dim=1).transpose(0, 1)


def within_chunks(*, k, v, g, beta, chunk_size, cu_seqlens, chunk_indices):
    assert chunk_size == CHUNK and k.is_contiguous() and v.is_contiguous()
    group = v.shape[2] // k.shape[2]
    w = v.new_full((*v.shape[:3], k.shape[3]), float("nan"))
    u = torch.full_like(v, float("nan"))
    for _, _, rows in _rows(cu_seqlens, chunk_indices):
        keys, values = _by_head(k, rows, group), _by_head(v, rows)
        assert torch.allclose(keys.norm(dim=-1), torch.ones(()), atol=2e-2), "keys are not normed"
        strength, decay = _by_head(beta, rows).unsqueeze(-1), _by_head(g, rows).unsqueeze(-1)
        system = (strength * (keys @ keys.mT) * (decay - decay.mT).exp2()).tril(-1)
        inverse = torch.linalg.inv(system + torch.eye(len(system[0])))
        u[0, rows] = (inverse @ (strength * values)).transpose(0, 1).to(v.dtype)
        w[0, rows] = (inverse @ (strength * decay.exp2() * keys)).transpose(0, 1).to(v.dtype)
    return w, u, None


def states(
    *,
    k,
    w,
    u,
    g,
    initial_state,
    output_final_state,
    state_v_first,
    chunk_size,
    chunk_offsets,
    cu_seqlens,
    chunk_indices,
):
    assert output_final_state and state_v_first and chunk_size == CHUNK
    assert initial_state.dtype == torch.float32
    assert len(initial_state) == len(cu_seqlens) - 1 == len(chunk_offsets) - 1
    group = u.shape[2] // k.shape[2]
    shape = (1, len(chunk_indices), *initial_state.shape[1:])
    h, values = k.new_full(shape, float("nan")), torch.full_like(u, float("nan"))
    final, bounds, offsets = initial_state.clone(), cu_seqlens.tolist(), chunk_offsets.tolist()
    for seq, state in enumerate(final):
        for number in range(-(-(bounds[seq + 1] - bounds[seq]) // CHUNK)):
            first = bounds[seq] + number * CHUNK
            rows = slice(first, min(first + CHUNK, bounds[seq + 1]))
            h[0, offsets[seq] + number] = state.to(h.dtype)
            delta = _by_head(u, rows) - _by_head(w, rows) @ state.mT
            values[0, rows] = delta.transpose(0, 1).to(u.dtype)
            decay = _by_head(g, rows).unsqueeze(-1)
            last = decay[:, -1:]
            written = (delta * (last - decay).exp2()).mT @ _by_head(k, rows, group)
            state.copy_(last.exp2() * state + written)
    return h, values, final


def outputs(*, q, k, v, h, g, scale, state_v_first, chunk_size, cu_seqlens, chunk_indices):
    assert state_v_first and chunk_size == CHUNK and q.is_contiguous()
    group = v.shape[2] // k.shape[2]
    out = torch.full_like(v, float("nan"))
    for place, _, rows in _rows(cu_seqlens, chunk_indices):
        queries, keys = _by_head(q, rows, group), _by_head(k, rows, group)
        decay = _by_head(g, rows).unsqueeze(-1)
        scores = ((queries @ keys.mT) * (decay - decay.mT).exp2()).tril()
        result = decay.exp2() * (queries @ h[0, place].float().mT) + scores @ _by_head(v, rows)
        out[0, rows] = (scale * result).transpose(0, 1).to(v.dtype)
    return out


def install(patch: pytest.MonkeyPatch, recurrent: object = None) -> None:
    """Put the parts where FLA's are imported from, until `patch` is undone."""
    parts = {
        "fla": {},
        "fla.ops": {},
        "fla.ops.common": {},
        "fla.ops.utils": {"chunk_local_cumsum": cumsum},
        "fla.ops.gated_delta_rule": {"fused_recurrent_gated_delta_rule": recurrent},
        "fla.ops.gated_delta_rule.chunk_fwd": {"chunk_gated_delta_rule_fwd_intra": within_chunks},
        "fla.ops.common.chunk_delta_h": {"chunk_gated_delta_rule_fwd_h": states},
        "fla.ops.common.chunk_o": {"chunk_fwd_o": outputs},
    }
    for name, functions in parts.items():
        module = ModuleType(name)
        vars(module).update(functions)
        patch.setitem(sys.modules, name, module)
    patch.setattr(fla, "_fla", fla._fla.__wrapped__)
