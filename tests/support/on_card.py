"""Marks of tests that need a CUDA device."""

import pytest
import torch

from minivllm_engine.memory.devices import first_gpu

needs_card = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # FLA, Triton and torch warn of their own affairs, in the midst of a step: that would fail it.
    pytest.mark.filterwarnings("ignore"),
]


def others_on_card() -> bool:
    """Does another process hold memory of the GPU, other tests that run now among them?"""
    gpu = first_gpu()
    assert gpu is not None
    held = torch.cuda.memory_reserved()
    # A context takes some hundred MiB, and that of this process is one.
    return (gpu.used or 0) > held + (1 << 30)
