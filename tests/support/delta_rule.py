"""The gated delta rule as its definition says it, one step at a time."""

import torch


def l2norm(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def recurrent_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    keep: frozenset[int] = frozenset(),
) -> tuple[torch.Tensor, torch.Tensor, dict[int, torch.Tensor]]:
    """One sequence, in the dtype of the arguments.

    Args: q, k [T, H, K]; v [T, HV, V]; g, beta [T, HV]; state [HV, V, K]; keep: step counts.
    Returns: o [T, HV, V], the final state, and the states after the step counts of `keep`.
    """
    group = v.shape[1] // k.shape[1]
    q = (l2norm(q) * q.shape[-1] ** -0.5).repeat_interleave(group, dim=1)
    k = l2norm(k).repeat_interleave(group, dim=1)
    out, kept = torch.empty_like(v), {}
    for t in range(v.shape[0]):
        state = state * g[t].exp()[:, None, None]
        delta = beta[t][:, None] * (v[t] - (state @ k[t][..., None])[..., 0])
        state = state + delta[..., None] * k[t][:, None, :]
        out[t] = (state @ q[t][..., None])[..., 0]
        if t + 1 in keep:
            kept[t + 1] = state
    return out, state, kept
