"""The oracle itself: which code it runs, and that it takes no padding."""

from pathlib import Path

import pytest
import torch

from support.transformers_oracle import TransformersOracle


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> TransformersOracle:
    return TransformersOracle(tiny_model)


def test_e5_a_mask_with_zeros_is_refused(oracle: TransformersOracle) -> None:
    for mask in ([[0, 1, 1]], [[1, 1, 0]]):
        with pytest.raises(ValueError, match="no padding"):
            oracle.logits([1, 2, 3], attention_mask=torch.tensor(mask))
    with_ones = oracle.logits([1, 2, 3], attention_mask=torch.ones(1, 3))
    assert torch.equal(with_ones, oracle.logits([1, 2, 3]))


def test_transformers_runs_its_plain_pytorch_form(oracle: TransformersOracle) -> None:
    import sys

    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    assert sys.modules["fla"] is None
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        assert getattr(modeling, name).__module__ == modeling.__name__
