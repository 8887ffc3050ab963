"""Frequencies and rotation against transformers."""

import pytest
import torch

from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.models.layers.step_plan import inverse_frequencies
from minivllm_engine.ops.fused.reference import apply_rotary, rotary_cos_sin
from support.tiny_checkpoint import tiny_config
from support.transformers_oracle import Qwen3_5TextConfig, Qwen3_5TextRotaryEmbedding

YARN = {"rope_type": "yarn", "rope_theta": 1e7, "original_max_position_embeddings": 2048}
ROPES = {
    "official": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    "half": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "full": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 1.0},
    "yarn": YARN | {"partial_rotary_factor": 0.25, "factor": 4.0},
    "yarn_scaled": YARN | {"partial_rotary_factor": 0.5, "factor": 8.0, "attention_factor": 1.3},
    "yarn_betas": YARN
    | {"partial_rotary_factor": 1.0, "factor": 2.0, "beta_fast": 16, "beta_slow": 2},
    "yarn_mscale": YARN
    | {"partial_rotary_factor": 0.25, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn_untruncated": YARN | {"partial_rotary_factor": 0.5, "factor": 4.0, "truncate": False},
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_cos_and_sin_equal_those_of_transformers(rope: dict) -> None:
    content = tiny_config(head_dim=64, rope_parameters=rope, max_position_embeddings=8192)
    theirs = Qwen3_5TextRotaryEmbedding(
        Qwen3_5TextConfig(**{k: v for k, v in content.items() if k != "architectures"})
    )
    config = ModelConfig.from_dict(content, "config.json")
    positions = torch.tensor([0, 1, 2, 63, 1000, 8191])
    expected = theirs(torch.zeros(1), positions.expand(3, 1, -1))
    frequencies = inverse_frequencies(config.rope, config.rotary_dim)
    ours = rotary_cos_sin(positions, frequencies, config.rope.attention_factor, torch.float32)
    for mine, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(torch.cat((mine, mine), -1)[:, 0], other[0], rtol=0, atol=2e-4)
        torch.testing.assert_close(mine[:4, 0], other[0, :4, : mine.shape[-1]], rtol=0, atol=1e-5)


def test_dimensions_beyond_the_rotated_ones_pass_through() -> None:
    x = torch.randn(3, 2, 16)
    cos, sin = rotary_cos_sin(torch.tensor([0, 1, 5]), torch.tensor([1.0, 0.1]), 1.0, torch.float32)
    out = apply_rotary(x, cos, sin)
    assert torch.equal(out[..., 4:], x[..., 4:])
    assert torch.equal(out[0], x[0])
    assert not torch.equal(out[1, :, :4], x[1, :, :4])
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))
