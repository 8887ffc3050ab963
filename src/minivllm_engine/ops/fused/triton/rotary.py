"""What is done to queries, keys and values between their projection and attention, and cos and sin of it."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minivllm_engine.ops.device import launch_options


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _angles_kernel(
    positions,
    frequencies,
    cos,
    sin,
    factor,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    columns = tl.arange(0, BLOCK)
    mask = columns < HALF
    frequency = tl.load(frequencies + columns, mask=mask, other=0.0)
    if EARLY:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    angles = tl.load(positions + token).to(tl.float32) * frequency
    at = token * HALF + columns
    # The library's, which reduce an angle of any size exactly, and not the card's approximations.
    tl.store(cos + at, (tl.cos(angles) * factor).to(cos.dtype.element_ty), mask=mask)
    tl.store(sin + at, (tl.sin(angles) * factor).to(sin.dtype.element_ty), mask=mask)


def rotary_cos_sin(
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    attention_factor: float,
    dtype: torch.dtype,
    *,
    early: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cos and sin of the angles position * frequency, in fp32, times a factor, rounded once.

    Args:
        positions: [num_tokens] integers, contiguous.
        frequencies: [rotary_dim / 2] fp32.
        dtype: of the results.
        early: start while the kernel before still runs; by default where the card can.

    Returns:
        Each [num_tokens, 1, rotary_dim / 2], for all heads.
    """
    num_tokens, half = positions.shape[0], frequencies.shape[0]
    both = torch.empty(2, num_tokens, 1, half, dtype=dtype, device=positions.device)
    cos, sin = both.unbind(0)
    _angles_kernel[(num_tokens,)](
        positions,
        frequencies,
        cos,
        sin,
        float(attention_factor),
        HALF=half,
        BLOCK=triton.next_power_of_2(half),
        num_warps=1,
        **launch_options(early, positions.device),
    )
    return cos, sin


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
