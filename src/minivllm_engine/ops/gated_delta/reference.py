"""The gated delta rule in plain PyTorch, computed in fp32.

    S <- exp(g) S;  d = beta (v - S k);  S <- S + d k^T;  o = S q

Letters as in FLA: H key heads of size K, HV value heads of size V, HV a multiple of H; value head j
belongs to key head j // (HV // H). States are V-first, [HV, V, K]. q and k come in raw: they are
normalised here, and q is scaled by K ** -0.5.
"""

import torch

from minivllm_engine.ops.gated_delta.plan import ReferenceChunkPlan, SlotPlan
from minivllm_engine.tensors.device_copy import cast, fp32

_NORM_EPS = 1e-6


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    pool: torch.Tensor,
    plan: ReferenceChunkPlan,
) -> torch.Tensor:
    """Compute the chunked form (UT transform, arXiv 2412.06464) over packed sequences.

    Padding steps have g = 0 and beta = 0, which leaves the state alone.

    Args:
        q, k: [num_tokens, H, K].
        v: [num_tokens, HV, V].
        g: [num_tokens, HV], log of the decay, at most 0.
        beta: [num_tokens, HV].
        pool: [num_slots, HV, V, K], the states; those of the plan's slots are advanced.
        plan: made for the lengths of these sequences.

    Returns:
        o [num_tokens, HV, V] in v's dtype.
    """
    out = v.new_empty(v.shape)
    state: torch.Tensor | None = None
    for part in plan.parts:
        laid_out = [fp32(x.index_select(0, part.rows)) for x in (q, k, v, g, beta)]
        for x in laid_out[3:]:
            x.index_fill_(0, part.padding, 0)
        if part.begin == "empty":
            state = None
        elif part.begin == "slot":
            state = fp32(pool.index_select(0, part.slots))
        o, state = _chunks(*(x.view(*part.shape, *x.shape[1:]) for x in laid_out), state=state)
        pool.index_copy_(0, part.slots, cast(state, pool.dtype))
        real = o.flatten(0, 2).index_select(0, part.places)
        out.index_copy_(0, part.tokens, cast(real, v.dtype))
    return out


def _chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """B sequences of N chunks of C steps each.

    With G the sum of g since the chunk began and D_ij = exp(G_i - G_j) for j <= i, the deltas solve
    (I + strict_lower(beta k k^T . D)) d = beta (v - exp(G) S k). Then o = exp(G) S q + (q k^T . D) d,
    and the state becomes exp(G_C) S + (exp(G_C - G) d) k^T.

    Args:
        q, k: [B, N, C, H, K]. v: [B, N, C, HV, V]. g, beta: [B, N, C, HV].
        state: [B, HV, V, K], or None where it is zero.

    Returns:
        o [B, N, C, HV, V] and the final state.
    """
    num_seqs, num_chunks, size, heads, key_dim = k.shape
    value_heads, value_dim = v.shape[3:]
    group = value_heads // heads
    # Keys and queries one below the other, [B, N, H, 2 C, K]: what is multiplied with the one is
    # multiplied with the other.
    both = l2norm(torch.stack((k, q), dim=2)).permute(0, 1, 4, 2, 3, 5).flatten(3, 4)
    keys = both[..., :size, :]
    v, beta, g = (_by_key_head(x, heads) for x in (v, beta, g))
    decay, decay_in, decay_out = _decays(g.squeeze(-1))
    products = (both @ keys.mT).view(num_seqs, num_chunks, heads, 2, 1, size, size)
    system = (products[:, :, :, 0] * decay).mul_(beta)
    within = decay.mul_(products[:, :, :, 1])

    def solve(n: int, target: torch.Tensor) -> torch.Tensor:
        solution: torch.Tensor = torch.linalg.solve_triangular(
            system[:, n], target * beta[:, n], upper=False, unitriangular=True
        )
        return solution

    def written(n: int, delta: torch.Tensor) -> torch.Tensor:
        return (delta * decay_out[:, n]).transpose(3, 4).flatten(2, 3) @ keys[:, n]

    out = v.new_empty(num_seqs, num_chunks, heads, group, size, value_dim)
    for n in range(num_chunks):
        if state is None:
            delta = solve(n, v[:, n])
            torch.matmul(within[:, n], delta, out=out[:, n])
            state = written(n, delta)
            continue
        state = state.view(num_seqs, heads, group * value_dim, key_dim)
        read = (both[:, n] @ state.mT).view(num_seqs, heads, 2, size, group, value_dim)
        state_k, state_q = read.movedim(4, 3).unbind(2)
        delta = solve(n, torch.addcmul(v[:, n], decay_in[:, n], state_k, value=-1))
        torch.addcmul(within[:, n] @ delta, decay_in[:, n], state_q, out=out[:, n])
        chunk_decay = decay_in[:, n, :, :, -1:].expand(-1, -1, -1, value_dim, 1)
        state = written(n, delta).addcmul_(state, chunk_decay.reshape(num_seqs, heads, -1, 1))
    assert state is not None
    out = out.mul_(key_dim**-0.5).permute(0, 1, 4, 2, 3, 5).flatten(3, 4)
    return out, state.view(num_seqs, value_heads, value_dim, key_dim)


def _by_key_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, N, C, HV, ...] -> [B, N, H, HV / H, C, ...]."""
    return x.view(*x.shape[:3], heads, x.shape[3] // heads, -1).permute(0, 1, 3, 4, 2, 5)


def _decays(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From g [..., C]: D [..., C, C], exp(G) [..., C, 1] and exp(G_C - G) [..., C, 1]."""
    g = g.cumsum(-1)
    future = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu(1)
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill_(future, -torch.inf).exp_()
    return decay, g.exp().unsqueeze(-1), (g[..., -1:] - g).exp_().unsqueeze(-1)


def gated_delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    pool: torch.Tensor,
    plan: SlotPlan,
) -> torch.Tensor:
    """Take one token for each of N sequences; their states in `pool` are updated in place.

    Args:
        q, k: [N, H, K].
        v: [N, HV, V].
        g, beta: [N, HV].
        pool: [num_slots, HV, V, K].
        plan: made for the slots of these sequences, of which no two are alike.

    Returns:
        o [N, HV, V] in v's dtype.
    """
    if plan.span is None or pool.dtype != torch.float32:
        state = fp32(pool.index_select(0, plan.slots))
        out = _step(q, k, v, g, beta, state)
        pool.index_copy_(0, plan.slots, cast(state, pool.dtype))
        return out
    state = pool[slice(*plan.span)]
    if plan.places is None:
        return _step(q, k, v, g, beta, state)
    # Slots in between that are not ours get a step of g = 0 and beta = 0, which leaves them as they are.
    q, k, v, g, beta = (
        x.new_zeros(state.shape[0], *x.shape[1:]).index_copy_(0, plan.places, x)
        for x in (q, k, v, g, beta)
    )
    return _step(q, k, v, g, beta, state).index_select(0, plan.places)


def _step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """As `gated_delta_step`, on the sequences' states [N, HV, V, K] fp32, in three passes over them.

    With a = exp(g), S q after the update is a (S q) + d (k q): so one product reads S k and S q.
    """
    num_seqs, heads, key_dim = k.shape
    value_heads, value_dim = v.shape[1:]
    by_key_head = (num_seqs, heads, value_heads // heads)
    both = l2norm(fp32(torch.stack((k, q), dim=2)))  # [N, H, 2, K]
    keys, queries = both.unbind(2)
    kq = torch.linalg.vecdot(keys, queries).view(num_seqs, heads, 1, 1)
    # In fp64 because the last bit of an fp32 exp depends on where in a batch the number stands.
    decay = cast(g, torch.float64).exp().float().view(*by_key_head, 1)
    read = torch.bmm(both.flatten(0, 1), state.view(num_seqs * heads, -1, key_dim).mT)
    state_k, state_q = read.view(num_seqs, heads, 2, -1, value_dim).unbind(2)
    delta = torch.addcmul(fp32(v).view(*by_key_head, value_dim), decay, state_k, value=-1)
    delta.mul_(fp32(beta).reshape(*by_key_head, 1))
    out = (decay * state_q).addcmul_(delta, kq).mul_(key_dim**-0.5)
    state.mul_(decay.view(num_seqs, value_heads, 1, 1))
    outer = delta.view(num_seqs, heads, -1, 1), keys.unsqueeze(2)
    state.view(num_seqs, heads, -1, key_dim).addcmul_(*outer)
    return cast(out.view(num_seqs, value_heads, value_dim), v.dtype)


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """Scale x to norm 1 over its last dimension; an epsilon keeps zeros what they are."""
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * norm.mul_(norm).add_(_NORM_EPS).rsqrt_()
