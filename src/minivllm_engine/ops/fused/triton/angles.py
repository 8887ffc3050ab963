"""cos and sin of the rotary embedding, once a step."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minivllm_engine.ops.dependent_launch import launch_options


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
    """cos and sin of the angles position * frequency, in fp32, times a factor, rounded once.

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
