"""The operations of ../reference.py as one Triton kernel, each a launch of it."""

from minivllm_engine.ops.small_batch.triton.linear import (
    gated_norm_linear_add_,
    linear_add_,
    norm_linear,
    norm_linear_swiglu,
    sigmoid_gate_linear_add_,
)

__all__ = [
    "gated_norm_linear_add_",
    "linear_add_",
    "norm_linear",
    "norm_linear_swiglu",
    "sigmoid_gate_linear_add_",
]
