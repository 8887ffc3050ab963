"""The operations of ../reference.py in Triton, each one kernel.

They round where the reference rounds, but for the rotary embedding, which is rounded once here and three
times there.
"""

from minivllm_engine.ops.fused.triton.norm import (
    add_rms_norm,
    gated_rms_norm,
    rms_norm,
    sigmoid_mul,
    silu_mul,
)
from minivllm_engine.ops.fused.triton.rotary import norm_rotate_write, rotary_cos_sin

__all__ = [
    "add_rms_norm",
    "gated_rms_norm",
    "norm_rotate_write",
    "rms_norm",
    "rotary_cos_sin",
    "sigmoid_mul",
    "silu_mul",
]
