"""Logits and states against transformers in fp32, over shapes of models and over ways to feed them."""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from support.packed_runner import PackedRunner, Row, load_model
from support.tiny_checkpoint import (
    OFFICIAL,
    TEXT,
    nested,
    official_dtypes,
    random_tensors,
    tiny_config,
    write_checkpoint,
)
from support.transformers_oracle import TransformersOracle

TOLERANCE = 2e-4  # on logits of a scale of 5
LENGTHS = (1, 2, 3, 4, 63, 64, 65, 130)
CHUNKINGS = {
    "one_shot": (130,),
    "on_the_grid": (64, 64, 2),
    "off_the_grid": (1, 7, 63),
    "odd_chunks": (2, 1, 1, 3, 60, 17),
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000,
    "partial_rotary_factor": 0.5,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
IRREGULAR = ["full_attention", "linear_attention", "linear_attention", "full_attention"]


@dataclass(frozen=True)
class Variant:
    config: dict
    prefix: str = TEXT
    official: bool = False  # nested config, BF16, tensors of a vision and an MTP part


def variant(prefix: str = TEXT, *, official: bool = False, **changes) -> Variant:
    return Variant(tiny_config(**changes), prefix, official)


VARIANTS = {
    "ratio_1_untied": variant(linear_num_value_heads=2, linear_value_head_dim=16),
    "ratio_2_tied": variant(linear_value_head_dim=16, tie_word_embeddings=True),
    "ratio_3_wide_values": variant(linear_num_value_heads=6, vocab_size=333),
    "ratio_2_wide_keys": variant(linear_key_head_dim=32, linear_value_head_dim=8),
    "official_multimodal": variant(OFFICIAL, official=True, tie_word_embeddings=True),
    "official_untied": variant(OFFICIAL, official=True, rms_norm_eps=1e-5),
    "yarn_half_rotary": variant(rope_parameters=YARN),
    "biases_no_gqa": variant(attention_bias=True, num_key_value_heads=4, head_dim=16),
    "wide_attention": variant(
        num_attention_heads=6, num_key_value_heads=2, head_dim=64, intermediate_size=96
    ),
    "irregular_short_conv": variant(layer_types=IRREGULAR, linear_conv_kernel_dim=3),
}


@dataclass(frozen=True)
class Loaded:
    path: Path
    oracle: TransformersOracle
    model: object


@pytest.fixture(scope="module", params=VARIANTS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    chosen = VARIANTS[request.param]
    config, tensors = chosen.config, random_tensors(chosen.config, prefix=chosen.prefix, seed=3)
    if chosen.official:
        config = nested(config)
        tensors = official_dtypes(tensors)
        tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(3, 3)
        tensors["mtp.fc.weight"] = torch.zeros(2, 2)
    path = write_checkpoint(tmp_path_factory.mktemp(request.param), config, tensors)
    return Loaded(path, TransformersOracle(path), load_model(path))


@pytest.fixture(scope="module")
def prompts(loaded: Loaded) -> list[list[int]]:
    rng = random.Random(1)
    vocab = loaded.model.config.vocab_size
    return [[rng.randrange(vocab) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(loaded: Loaded, prompts: list[list[int]]) -> list[tuple]:
    return [loaded.oracle.run(prompt) for prompt in prompts]


def assert_same_states(runner: PackedRunner, row: Row, cache, tolerance: float = 1e-4) -> None:
    """Conv and recurrent states of a sequence against those of transformers after the same tokens."""
    config = runner.model.config
    linear = [i for i, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    columns = config.linear_conv_kernel_dim - 1
    for rank, index in enumerate(linear):
        layer = cache.layers[index]
        state = runner.pool.recurrent[rank][row.slot]
        conv = runner.pool.conv[rank][row.slot]
        torch.testing.assert_close(state, layer.recurrent_states[0][0].mT, rtol=0, atol=tolerance)
        torch.testing.assert_close(
            conv, layer.conv_states[0][0][:, -columns:], rtol=0, atol=tolerance
        )


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_logits_and_states_in_chunks(loaded, prompts, expected, chunking) -> None:
    for prompt, (logits, cache) in zip(prompts, expected, strict=True):
        runner = PackedRunner(loaded.model)
        row = runner.run(prompt, *CHUNKINGS[chunking])
        torch.testing.assert_close(row.all_logits, logits, rtol=0, atol=TOLERANCE)
        assert_same_states(runner, row, cache)


def test_logits_and_states_token_by_token_in_a_batch(loaded, prompts, expected) -> None:
    """All prompts decode side by side, each from its first token on, and end one by one."""
    runner = PackedRunner(loaded.model)
    rows = [runner.add(prompt) for prompt in prompts]
    while any(row.done < len(row.token_ids) for row in rows):
        runner.step(*((row, 1) for row in rows if row.done < len(row.token_ids)))
    for row, (logits, cache) in zip(rows, expected, strict=True):
        torch.testing.assert_close(row.all_logits, logits, rtol=0, atol=TOLERANCE)
        assert_same_states(runner, row, cache)


def test_e6_packed_sequences_do_not_see_each_other(loaded, prompts, expected) -> None:
    """All prompts in one step; then the same in two, cut at a third, so that all have a past."""
    runner = PackedRunner(loaded.model)
    rows = [runner.add(prompt) for prompt in prompts]
    runner.step(*((row, len(row.token_ids)) for row in rows), decode_singles=False)
    for row, (logits, cache) in zip(rows, expected, strict=True):
        torch.testing.assert_close(row.all_logits, logits, rtol=0, atol=TOLERANCE)
        assert_same_states(runner, row, cache)

    runner = PackedRunner(loaded.model, seed=1)
    rows = [runner.add(prompt) for prompt in prompts if len(prompt) > 2]
    for row in rows:
        runner.step((row, len(row.token_ids) // 3))
    runner.step(*((row, len(row.token_ids) - row.done) for row in rows))
    for row, (logits, cache) in zip(rows, expected[-len(rows) :], strict=True):
        torch.testing.assert_close(row.all_logits, logits, rtol=0, atol=TOLERANCE)
        assert_same_states(runner, row, cache)


def test_decodes_and_prefill_chunks_in_one_step(loaded, prompts, expected) -> None:
    """Each step decodes some sequences and feeds chunks of 5 tokens of others."""
    runner = PackedRunner(loaded.model, seed=2)
    rows = [runner.add(prompt) for prompt in prompts]
    step = 0
    while any(row.done < len(row.token_ids) for row in rows):
        parts = []
        for i, row in enumerate(rows):
            left = len(row.token_ids) - row.done
            if left:
                parts.append((row, min(left, 1 if (i + step) % 2 else 5)))
        runner.step(*parts)
        step += 1
    for row, (logits, cache) in zip(rows, expected, strict=True):
        torch.testing.assert_close(row.all_logits, logits, rtol=0, atol=TOLERANCE)
        assert_same_states(runner, row, cache)
