"""Norms, activations and rotary embedding in plain PyTorch. What they round, and where, is the model's."""

import torch
import torch.nn.functional as F

from minivllm_engine.tensors.device_copy import cast, fp32


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """Compute x / rms(x) * scale over the last dimension of x, in fp32, rounded once at the end.

    Args:
        x: [..., size].
        scale: fp32, of a shape that x's can be multiplied with.
        eps: [1] fp32, added to the mean square.
    """
    return cast(x.mul(_inverse_rms(x, eps)).mul_(scale), x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor, eps: torch.Tensor
) -> torch.Tensor:
    """Add x to `residual` in place, rounded, and return the norm of the sum.

    Args:
        x, residual: [num_rows, size], of one dtype.
        scale: [size] fp32.
        eps: [1] fp32.
    """
    return rms_norm(residual.add_(x), scale, eps)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor
) -> torch.Tensor:
    """Compute (weight * x / rms(x)) * silu(gate) over the last dimension, x / rms(x) rounded first.

    Args:
        x, gate: [..., size].
        weight: [size] fp32.
        eps: [1] fp32.
    """
    normed = cast(x.mul(_inverse_rms(x, eps)), x.dtype)
    return cast(F.silu(fp32(gate)).mul_(weight).mul_(normed), x.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up [num_rows, size] of [num_rows, 2 size], which holds both side by side."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Compute x * sigmoid(gate), in x's place. Both [num_rows, ..., size]."""
    return x.mul_(torch.sigmoid(gate))


def rotary_cos_sin(
    positions: torch.Tensor, frequencies: torch.Tensor, attention_factor: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cos and sin of the angles position * frequency, in fp32, times a factor, rounded once.

    Args:
        positions: [num_tokens] integers.
        frequencies: [rotary_dim / 2] fp32.

    Returns:
        Each [num_tokens, 1, rotary_dim / 2], for all heads.
    """
    angles = (positions.float().unsqueeze(-1) * frequencies).unsqueeze(1)
    return (angles.cos() * attention_factor).to(dtype), (angles.sin() * attention_factor).to(dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [num_tokens, num_heads, head_dim] in its first dimensions; the others pass through.

    Halves layout (NeoX); cos, sin: [num_tokens, 1, rotary_dim / 2], of x's dtype.
    """
    half = cos.shape[-1]
    first, second, rest = torch.split_with_sizes(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def norm_rotate_write(
    query_key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: torch.Tensor,
    eps: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kv_slots: torch.Tensor,
) -> torch.Tensor:
    """Norm and rotate queries and keys, write keys and values into the cache, and return the queries.

    H query heads, G key/value heads, d the head's size.

    Args:
        query_key: [num_tokens, H + G, d].
        value: [num_tokens, G, d].
        scale: [H + G, d] fp32, of the norms.
        eps: [1] fp32, of the norms.
        cos, sin: [num_tokens, 1, rotary_dim / 2], of the dtype of query_key.
        keys, values: [num_blocks, block_size, G, d].
        kv_slots: [num_tokens], where in them each token goes: block * block_size + offset.

    Returns:
        [num_tokens, H, d].
    """
    query_key = apply_rotary(rms_norm(query_key, scale, eps), cos, sin)
    num_kv_heads = value.shape[1]
    num_heads = query_key.shape[1] - num_kv_heads
    query, key = torch.split_with_sizes(query_key, [num_heads, num_kv_heads], dim=1)
    keys.flatten(0, 1).index_copy_(0, kv_slots, key)
    values.flatten(0, 1).index_copy_(0, kv_slots, value)
    return query


def _inverse_rms(x: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """[..., 1] fp32."""
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
