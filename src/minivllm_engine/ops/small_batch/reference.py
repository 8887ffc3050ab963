"""Small-batch products in plain PyTorch, put together from the operations that they fuse.

B rows. Weights are [out, in] as in checkpoints.
"""

import torch
import torch.nn.functional as F

from minivllm_engine.ops.fused.reference import gated_rms_norm, rms_norm, sigmoid_mul, silu_mul


def norm_linear(
    x: torch.Tensor,
    scale: torch.Tensor,
    eps: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute rms_norm(x) weight^T + bias.

    Args:
        x: [B, in].
        scale: [in] fp32, of the norm.
        eps: [1] fp32, of the norm.
        weight: [out, in].
        bias: [out].

    Returns:
        [B, out].
    """
    return F.linear(rms_norm(x, scale, eps), weight, bias)


def norm_linear_swiglu(
    x: torch.Tensor, scale: torch.Tensor, eps: torch.Tensor, gate_up: torch.Tensor
) -> torch.Tensor:
    """Compute silu(gate) * up of the products of rms_norm(x) with both.

    Args:
        x: [B, in].
        scale: [in] fp32, of the norm.
        eps: [1] fp32, of the norm.
        gate_up: [2 wide, in], the rows of gate first.

    Returns:
        [B, wide].
    """
    return silu_mul(F.linear(rms_norm(x, scale, eps), gate_up))


def linear_add_(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add x weight^T + bias, rounded, to `residual` [B, out] in place.

    Args:
        x: [B, in].
        weight: [out, in].
        residual: [B, out].
        bias: [out].
    """
    return residual.add_(F.linear(x, weight, bias))


def gated_norm_linear_add_(
    x: torch.Tensor,
    gate: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
) -> torch.Tensor:
    """Add gated_rms_norm(x, gate) weight^T, rounded, to `residual` in place: the end of DeltaNet.

    Args:
        x, gate: [B, HV, V].
        norm_weight: [V] fp32.
        eps: [1] fp32, of the norm.
        weight: [out, HV V].
        residual: [B, out].
    """
    normed = gated_rms_norm(x, gate, norm_weight, eps).flatten(1)
    return residual.add_(F.linear(normed, weight))


def sigmoid_gate_linear_add_(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add (x * sigmoid(gate)) weight^T + bias, rounded, to `residual` in place: the end of attention.

    Args:
        x, gate: [B, H, d]. x is not kept: it may be overwritten.
        weight: [out, H d].
        residual: [B, out].
        bias: [out].
    """
    return residual.add_(F.linear(sigmoid_mul(x, gate).flatten(1), weight, bias))
