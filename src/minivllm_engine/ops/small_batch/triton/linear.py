"""The operations of ../reference.py, each one launch of the kernel.

B is 1 to MAX_ROWS rows, and one compiled kernel for each number of them. x, residual and gate may have their
rows apart, each contiguous; weights are [out, in], contiguous. Sums are taken in fp32, and rounded where the
reference rounds.

early: start while the kernel before still runs (ops/device.py says what that asks of the others); by
default where the card can. tile: another one than choose_tile gives, for measurements.
"""

from typing import Any

import torch
import triton

from minivllm_engine.ops.device import device_limits, launch_options
from minivllm_engine.ops.small_batch.tiles import MAX_ROWS, Tile, choose_tile
from minivllm_engine.ops.small_batch.triton import kernel


def norm_linear(
    x: torch.Tensor,
    scale: torch.Tensor,
    eps: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    early: bool | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Compute rms_norm(x) weight^T + bias.

    Args:
        x: [B, in].
        scale: [in] fp32, of the norm.
        eps: [1] fp32, of the norm.
        weight: [out, in]. With the embedding of a whole vocabulary this is the output head.
        bias: [out].
        out: [B, out], to be written to instead of a new tensor; rows contiguous.

    Returns:
        [B, out].
    """
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0])
    _product(
        x,
        weight,
        out,
        bias=bias,
        norm=(scale, eps),
        input_kind=kernel.NORM,
        output_kind=kernel.STORE,
        early=early,
        tile=tile,
    )
    return out


def norm_linear_swiglu(
    x: torch.Tensor,
    scale: torch.Tensor,
    eps: torch.Tensor,
    gate_up: torch.Tensor,
    *,
    early: bool | None = None,
    tile: Tile | None = None,
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
    out = x.new_empty(x.shape[0], gate_up.shape[0] // 2)
    _product(
        x,
        gate_up,
        out,
        norm=(scale, eps),
        input_kind=kernel.NORM,
        output_kind=kernel.SWIGLU,
        early=early,
        tile=tile,
    )
    return out


def linear_add_(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    early: bool | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Add x weight^T + bias, rounded, to `residual` in place.

    Args:
        x: [B, in].
        weight: [out, in].
        residual: [B, out].
        bias: [out].
    """
    return _product(
        x,
        weight,
        residual,
        bias=bias,
        input_kind=kernel.PLAIN,
        output_kind=kernel.ADD,
        early=early,
        tile=tile,
    )


def gated_norm_linear_add_(
    x: torch.Tensor,
    gate: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    *,
    early: bool | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Add gated_rms_norm(x, gate) weight^T, rounded, to `residual` in place: the end of DeltaNet.

    Args:
        x, gate: [B, HV, V].
        norm_weight: [V] fp32.
        eps: [1] fp32, of the norm.
        weight: [out, HV V].
        residual: [B, out].
    """
    return _product(
        x,
        weight,
        residual,
        gate=gate,
        norm=(norm_weight, eps),
        input_kind=kernel.GATED_NORM,
        output_kind=kernel.ADD,
        early=early,
        tile=tile,
    )


def sigmoid_gate_linear_add_(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    early: bool | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Add (x * sigmoid(gate)) weight^T + bias, rounded, to `residual` in place: the end of attention.

    Args:
        x, gate: [B, H, d].
        weight: [out, H d].
        residual: [B, out].
        bias: [out].
    """
    return _product(
        x,
        weight,
        residual,
        bias=bias,
        gate=gate,
        input_kind=kernel.SIGMOID_GATE,
        output_kind=kernel.ADD,
        early=early,
        tile=tile,
    )


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    input_kind: Any,
    output_kind: Any,
    bias: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, torch.Tensor] | None = None,
    early: bool | None,
    tile: Tile | None,
) -> torch.Tensor:
    num_rows, num_outputs = out.shape
    num_inputs = weight.shape[1]
    if num_rows > MAX_ROWS:
        raise ValueError(f"{num_rows} rows, and at most {MAX_ROWS} are a small batch")
    tile = tile or choose_tile(weight.shape[0], num_inputs, device_limits(x.device))
    swiglu, gated_norm = output_kind == kernel.SWIGLU, input_kind == kernel.GATED_NORM
    head = x.shape[-1] if gated_norm else num_inputs
    # Heads that are no powers of two have gaps between them in a tile.
    padded_head = triton.next_power_of_2(head) if gated_norm else 1
    block_in = max(tile.num_inputs, padded_head)
    padded_inputs = num_inputs // head * padded_head if gated_norm else num_inputs
    block_out = max(tile.num_outputs // 2, 1) if swiglu else tile.num_outputs
    scale, eps = norm or (x, x)
    gate_or_x = x if gate is None else gate
    kernel._product_kernel[(triton.cdiv(num_outputs, block_out),)](
        x,
        gate_or_x,
        scale,
        eps,
        weight,
        weight if bias is None else bias,
        out,
        x.stride(0),
        gate_or_x.stride(0),
        out.stride(0),
        B=num_rows,
        PADDED=triton.next_power_of_2(num_rows),
        OUT=num_outputs,
        IN=num_inputs,
        HEAD=head,
        CHUNKS=triton.cdiv(padded_inputs, block_in),
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        INPUT=input_kind.value,
        OUTPUT=output_kind.value,
        HAS_BIAS=bias is not None,
        num_warps=tile.num_warps,
        maxnreg=tile.num_registers if num_rows == 1 and x.element_size() == 2 else None,
        **launch_options(early, x.device),
    )
    return out
