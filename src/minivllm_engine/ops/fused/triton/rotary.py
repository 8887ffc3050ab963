"""What is done to queries, keys and values between their projection and attention."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minivllm_engine.ops.dependent_launch import launch_options


@triton.jit(do_not_specialize_on_alignment=["kv_slots"])
def _rotate_kernel(
    query_key,
    value,
    scale,
    eps,
    cos,
    sin,
    keys,
    values,
    kv_slots,
    out,
    query_key_row,
    value_row,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    mask, rotated = columns < D, columns < 2 * HALF
    dtype = out.dtype.element_ty
    # Dimension by dimension, the one that it is rotated with.
    partner = tl.where(columns < HALF, columns + HALF, columns - HALF)
    scale_at = scale + head * D
    factors = tl.load(scale_at + columns, mask=mask, other=0.0)
    other_factors = tl.load(scale_at + partner, mask=rotated, other=0.0)
    epsilon = tl.load(eps)
    if EARLY:
        gdc_wait()

    head_at = query_key + token * query_key_row + head * D
    numbers = tl.load(head_at + columns, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(numbers * numbers, axis=0) / D + epsilon)
    normed = (numbers * inverse * factors).to(dtype).to(tl.float32)
    others = tl.load(head_at + partner, mask=rotated, other=0.0).to(tl.float32)
    others = (others * inverse * other_factors).to(dtype).to(tl.float32)
    angle_at = token * HALF + columns % HALF
    cosine = tl.load(cos + angle_at, mask=rotated, other=1.0).to(tl.float32)
    sine = tl.load(sin + angle_at, mask=rotated, other=0.0).to(tl.float32)
    result = normed * cosine + tl.where(columns < HALF, -others, others) * sine

    if head < H:
        tl.store(out + (token * H + head) * D + columns, result.to(dtype), mask=mask)
    else:
        slot = tl.load(kv_slots + token).to(tl.int64)
        own = tl.load(value + token * value_row + (head - H) * D + columns, mask=mask, other=0.0)
        mask = mask & (slot >= 0)
        at = (slot * G + head - H) * D + columns
        tl.store(keys + at, result.to(dtype), mask=mask)
        tl.store(values + at, own, mask=mask)


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
    early: bool | None = None,
) -> torch.Tensor:
    """Norm and rotate queries and keys, write keys and values into the cache, and return the queries.

    H query heads, G key/value heads, d the head's size.

    Args:
        query_key: [num_tokens, H + G, d]; tokens may lie apart, each is contiguous.
        value: [num_tokens, G, d], likewise.
        scale: [H + G, d] fp32, of the norms.
        eps: [1] fp32, of the norms.
        cos, sin: [num_tokens, 1, rotary_dim / 2], contiguous.
        keys, values: [num_blocks, block_size, G, d], of the dtype of query_key.
        kv_slots: [num_tokens], where in them each token goes: block * block_size + offset; nowhere if
            negative.
        early: start while the kernel before still runs; by default where the card can.

    Returns:
        [num_tokens, H, d].
    """
    num_tokens, num_rotated, head_dim = query_key.shape
    num_kv_heads = value.shape[1]
    num_heads = num_rotated - num_kv_heads
    out = query_key.new_empty(num_tokens, num_heads, head_dim)
    _rotate_kernel[(num_tokens, num_rotated)](
        query_key,
        value,
        scale,
        eps,
        cos,
        sin,
        keys,
        values,
        kv_slots,
        out,
        query_key.stride(0),
        value.stride(0),
        H=num_heads,
        G=num_kv_heads,
        D=head_dim,
        HALF=cos.shape[-1],
        BLOCK=triton.next_power_of_2(head_dim),
        num_warps=1,
        **launch_options(early, query_key.device),
    )
    return out
