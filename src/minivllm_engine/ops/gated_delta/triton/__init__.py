"""The gated delta rule in Triton, token by token: states are updated in place, each read and written once.

    S <- exp(g) S;  d = beta (v - S k);  S <- S + d k^T;  o = S q

Letters and layouts as in ../reference.py. The gates, the norms of q and k and the choice of the slot are
inside the kernels, each of which so is the only one between the convolution and the output's norm.
"""

from minivllm_engine.ops.gated_delta.triton.recurrent import RecurrentPlan, gated_delta_recurrent
from minivllm_engine.ops.gated_delta.triton.rule import delta_gates
from minivllm_engine.ops.gated_delta.triton.states import gather_states, scatter_states
from minivllm_engine.ops.gated_delta.triton.step import gated_delta_step

__all__ = [
    "RecurrentPlan",
    "delta_gates",
    "gated_delta_recurrent",
    "gated_delta_step",
    "gather_states",
    "scatter_states",
]
