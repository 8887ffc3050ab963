"""What fits: arithmetic, defaults that are lowered, values that are refused."""

import dataclasses
import logging

import pytest

from minivllm_engine.checkpoint_index import resolve_model
from minivllm_engine.config import EngineConfig
from minivllm_engine.errors import CapacityError, ConfigError
from minivllm_engine.memory_plan import kv_bytes_per_token, plan_memory, slot_bytes
from minivllm_engine.model_config import ModelConfig

DEMO = ModelConfig.from_dir(resolve_model("demo"))
# The sizes of the 0.8B model that count here.
LARGE = dataclasses.replace(
    DEMO,
    layer_types=("linear_attention",) * 18 + ("full_attention",) * 6,
    linear_num_key_heads=16,
    linear_num_value_heads=16,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    num_key_value_heads=2,
    head_dim=256,
    max_position_embeddings=262144,
)
GIB = 2**30


def plan(model: ModelConfig = DEMO, ram: int = 16 * GIB, **sections: dict):
    return plan_memory(model, EngineConfig.create(**sections), ram)


def test_bytes_of_the_08b_shape() -> None:
    assert slot_bytes(LARGE, "bf16", "bf16") == 10_100_736
    assert slot_bytes(LARGE, "bf16", "fp32") == 18_874_368 + 663_552
    assert kv_bytes_per_token(LARGE, "bf16") == 12_288


def test_the_pools_stay_within_the_memory_they_are_given() -> None:
    for model in (DEMO, LARGE):
        for memory in ("300MiB", "1GiB", "4GiB"):
            result = plan(model, engine={"cpu_memory": memory})
            assert (
                result.pool_bytes
                <= EngineConfig.create(engine={"cpu_memory": memory}).engine.cpu_memory
            )
            assert result.num_blocks * result.block_size >= result.max_model_len


def test_a_default_that_does_not_fit_is_lowered_with_one_warning(caplog) -> None:
    with caplog.at_level(logging.WARNING, "minivllm_engine"):
        result = plan(LARGE, engine={"cpu_memory": "1GiB", "max_model_len": 4096})
    assert result.max_num_seqs < 256
    assert len(caplog.records) == 1
    assert "engine.max_num_seqs" in caplog.text
    assert str(result.max_num_seqs) in caplog.text


def test_the_length_is_lowered_to_what_the_blocks_hold(caplog) -> None:
    with caplog.at_level(logging.WARNING, "minivllm_engine"):
        result = plan(cache={"num_blocks": 5, "block_size": 32})
    assert result.max_model_len == 160
    assert "engine.max_model_len lowered from 4096 to 160" in caplog.text


def test_nothing_is_said_when_everything_fits(caplog) -> None:
    with caplog.at_level(logging.DEBUG, "minivllm_engine"):
        result = plan()
    assert (result.max_num_seqs, result.max_model_len) == (256, 4096)
    assert not caplog.records


@pytest.mark.parametrize(
    ("model", "engine", "cache"),
    [
        (LARGE, {"max_num_seqs": 5000}, {}),
        (LARGE, {"cpu_memory": "1GiB", "max_num_seqs": 100}, {}),
        (LARGE, {"cpu_memory": "10MiB"}, {}),
        (LARGE, {"cpu_memory": "40MiB", "max_num_seqs": 1}, {"block_size": 512}),
        (DEMO, {"max_model_len": 4000}, {"num_blocks": 3}),
        (DEMO, {"cpu_memory": "2MiB", "max_model_len": 4000}, {}),
        (LARGE, {"cpu_memory": "1GiB", "max_model_len": 200_000, "max_num_seqs": 4}, {}),
    ],
)
def test_f1_a_value_that_was_set_is_refused_with_one_that_fits(model, engine, cache) -> None:
    with pytest.raises(CapacityError) as caught:
        plan(model, engine=engine, cache=cache)
    hint = caught.value.hint
    assert hint.startswith("--set engine.")
    key, value = hint.removeprefix("--set engine.").split("=")
    value = value if value.endswith("iB") else int(value)
    plan(model, engine={**engine, key: value}, cache=cache)


def test_a_length_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(engine={"max_model_len": 5000})
    assert "4096" in str(caught.value)
