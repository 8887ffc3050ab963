"""What fits: arithmetic, defaults that are lowered, rows that add up."""

import logging
import platform
from dataclasses import replace
from itertools import pairwise

import pytest

from minivllm_engine.checkpoint.index import resolve_model
from minivllm_engine.core.config import EngineConfig
from minivllm_engine.core.errors import CapacityError, ConfigError
from minivllm_engine.core.units import format_size
from minivllm_engine.memory.devices import CUDA_CONTEXT_BYTES, DeviceMemory, DeviceProcess
from minivllm_engine.memory.plan import plan_memory, try_plan
from minivllm_engine.memory.sizes import (
    X86,
    graph_sizes,
    kv_bytes_per_token,
    kv_saved,
    slot_bytes,
    weight_bytes,
)
from minivllm_engine.model_config.config import ModelConfig
from support.qwen35_08b import CONFIG, NUM_PARAMETERS

GIB, MIB = 2**30, 2**20
DEMO = ModelConfig.from_dir(resolve_model("demo"))
LARGE = ModelConfig.from_dict(CONFIG, "config.json")


def gpu(total: int = 80 * GIB, *processes: DeviceProcess, reserved: int = 0) -> DeviceMemory:
    return DeviceMemory("cuda", "GPU", total, processes, reserved)


def plan(model: ModelConfig = DEMO, memory: DeviceMemory | int = 16 * GIB, **sections: dict):
    return plan_memory(model, EngineConfig.create(**sections), memory)


def test_the_08b_shape_takes_what_its_config_says() -> None:
    assert format_size(slot_bytes(LARGE, "bf16", "bf16")) == "9.63 MiB"
    assert format_size(slot_bytes(LARGE, "bf16", "fp32")) == "18.63 MiB"
    assert kv_bytes_per_token(LARGE, "bf16") == 12 * 1024
    assert (LARGE.num_attention_layers, LARGE.num_hidden_layers) == (6, 24)
    assert kv_saved(LARGE) == 0.75


def test_the_weights_of_the_08b_shape_are_its_parameters() -> None:
    # A_log, dt_bias and the DeltaNet norm stay fp32, scales and convolutions have fp32 copies.
    assert 0 <= weight_bytes(LARGE, "bf16", tied=True) - 2 * NUM_PARAMETERS < 0.004 * NUM_PARAMETERS
    head = LARGE.vocab_size * LARGE.hidden_size * 4
    assert weight_bytes(LARGE, "fp32", tied=False) - weight_bytes(LARGE, "fp32", tied=True) == head


@pytest.mark.parametrize("model", [DEMO, LARGE], ids=["demo", "0.8B"])
@pytest.mark.parametrize("memory", ["300MiB", "1GiB", "4GiB"])
def test_the_pools_stay_within_the_memory_they_are_given(model: ModelConfig, memory: str) -> None:
    result = plan(model, engine={"cpu_memory": memory})
    assert result.pool_bytes <= result.memory
    assert result.memory == EngineConfig.create(engine={"cpu_memory": memory}).engine.cpu_memory
    assert result.num_blocks * result.block_size >= result.max_model_len


@pytest.mark.parametrize("device", [16 * GIB, gpu(), gpu(24 * GIB, DeviceProcess(1, "x", 3 * GIB))])
def test_f5_rows_add_up_to_the_device_and_the_pools_to_their_figures(device) -> None:
    result = plan(LARGE, device)
    rows = {row.name: row.num_bytes for row in result.rows(from_headers=False)}
    assert sum(rows.values()) == result.device.total
    assert min(rows.values()) >= 0
    tokens, slots = result.num_blocks * result.block_size, result.max_num_seqs
    capacity = tokens * kv_bytes_per_token(LARGE, result.dtype) + slots * result.slot_bytes
    capacity += result.num_snapshots * result.slot_bytes
    assert capacity == pytest.approx(
        rows["KV blocks"] + rows["state slots"] + rows["snapshots"], rel=0.01
    )


def test_f7_every_pool_has_the_size_that_was_asked_for() -> None:
    for cache in ({"num_blocks": 100}, {"snapshot_memory": "200MiB"}, {}):
        result = plan(LARGE, engine={"max_num_seqs": 7, "cpu_memory": "2GiB"}, cache=cache)
        assert result.max_num_seqs == 7
        assert result.state_bytes == 8 * result.slot_bytes
        assert result.num_blocks == cache.get("num_blocks", result.num_blocks)
        asked = 200 * MIB if "snapshot_memory" in cache else 2 * GIB // 10
        assert 0 <= asked - result.snapshot_bytes < result.slot_bytes
        assert result.pool_bytes <= 2 * GIB
    # One size of one pool moves no other.
    small = plan(LARGE, engine={"max_num_seqs": 7}, cache={"num_blocks": 100})
    large = plan(LARGE, engine={"max_num_seqs": 7}, cache={"num_blocks": 200})
    assert (small.max_num_seqs, small.num_snapshots) == (large.max_num_seqs, large.num_snapshots)


def test_c12_snapshots_stay_within_their_own_budget() -> None:
    result = plan(LARGE, cache={"snapshot_memory": "100MiB"})
    assert result.num_snapshots == 100 * MIB // result.slot_bytes == 5
    assert plan(LARGE, cache={"snapshot_memory": 0}).num_snapshots == 0
    off = plan(LARGE, cache={"prefix_cache": False, "snapshot_memory": "100MiB"})
    assert (off.num_snapshots, off.min_reusable_prefix) == (0, None)
    automatic = plan(LARGE, engine={"cpu_memory": "2GiB"})
    assert automatic.num_snapshots == 2 * GIB // 10 // automatic.slot_bytes


def test_f1_a_default_that_does_not_fit_is_lowered_with_one_warning(caplog) -> None:
    with caplog.at_level(logging.WARNING, "minivllm_engine"):
        result = plan(LARGE, engine={"cpu_memory": "1GiB", "max_model_len": 4096})
    assert result.max_num_seqs < 256
    assert len(caplog.records) == 1
    lowered = f"engine.max_num_seqs lowered from 256 to {result.max_num_seqs}: "
    assert caplog.text.count(lowered) == 1


def test_the_length_is_lowered_to_what_the_blocks_hold(caplog) -> None:
    with caplog.at_level(logging.WARNING, "minivllm_engine"):
        result = plan(cache={"num_blocks": 5, "block_size": 32})
    assert result.max_model_len == 160
    assert "engine.max_model_len lowered from 4096 to 160" in caplog.text
    assert "the KV pool has 5 blocks of 32 tokens" in caplog.text


def test_one_is_told_as_one(caplog) -> None:
    with caplog.at_level(logging.WARNING, "minivllm_engine"):
        plan(cache={"num_blocks": 1})
    assert "the KV pool has 1 block of 64 tokens" in caplog.text
    with pytest.raises(CapacityError, match="128 KV blocks; 1 fits") as caught:
        plan(LARGE, engine={"max_model_len": 8192}, cache={"num_blocks": 1})
    assert "--set engine.max_model_len=64" in str(caught.value.hint)


def test_snapshots_give_way_to_what_was_set(caplog) -> None:
    config = {"max_num_seqs": 20, "max_model_len": 12_000, "cpu_memory": "730MiB"}
    with caplog.at_level(logging.WARNING, "minivllm_engine"):
        result = plan(LARGE, engine=config)
    assert 0 < result.snapshot_bytes < 73 * MIB - result.slot_bytes
    assert "cache.snapshot_memory lowered from 73.00 MiB" in caplog.text


def test_weights_come_off_before_the_pools(caplog) -> None:
    with caplog.at_level(logging.WARNING, "minivllm_engine"):
        result = plan(LARGE, 4 * GIB, engine={"max_num_seqs": 2})
    assert result.memory == 4 * GIB - result.weight_bytes - result.activation_bytes < GIB
    assert "engine.cpu_memory lowered" not in plan_text(caplog, 8 * GIB)
    assert "engine.cpu_memory lowered from 1.00 GiB" in caplog.text


def plan_text(caplog, ram: int) -> str:
    with caplog.at_level(logging.WARNING, "minivllm_engine"):
        before = len(caplog.records)
        plan(LARGE, ram, engine={"max_num_seqs": 2})
    return " ".join(record.getMessage() for record in caplog.records[before:])


@pytest.mark.skipif(platform.machine() not in X86, reason="heads are laid out anew on x86 alone")
def test_a_tied_head_is_laid_out_apart_where_there_is_room() -> None:
    roomy, tight = plan(LARGE, 64 * GIB), plan(LARGE, 8 * GIB)
    assert roomy.packs_head and not tight.packs_head
    head = LARGE.vocab_size * LARGE.hidden_size * 4
    assert roomy.weight_bytes - tight.weight_bytes == head
    assert not plan(LARGE, 64 * GIB, engine={"dtype": "fp16"}).packs_head
    assert not plan(replace(LARGE, tie_word_embeddings=False), 64 * GIB).packs_head


def test_nothing_is_said_when_everything_fits(caplog) -> None:
    with caplog.at_level(logging.DEBUG, "minivllm_engine"):
        result = plan()
    assert (result.max_num_seqs, result.max_model_len) == (256, 4096)
    assert not caplog.records


@pytest.mark.parametrize(
    ("engine", "cache", "text"),
    [
        ({}, {"snapshot_memory": "1MiB"}, "a state snapshot takes"),
        ({"max_model_len": 65}, {}, "its shortest prefix is longer"),
        ({"max_model_len": 66}, {}, None),
        ({"max_model_len": 66}, {"block_size": 128}, "its shortest prefix is longer"),
        ({"max_model_len": 65}, {"prefix_cache": False}, None),
        ({}, {"snapshot_memory": 0}, None),
    ],
)
def test_k13_a_prefix_cache_that_can_never_hit_is_a_warning(engine, cache, text, caplog) -> None:
    with caplog.at_level(logging.WARNING, "minivllm_engine"):
        plan(DEMO if "snapshot_memory" not in cache else LARGE, engine=engine, cache=cache)
    said = [r.getMessage() for r in caplog.records if "cannot hit" in r.getMessage()]
    assert len(said) == (text is not None)
    assert text is None or text in said[0]


def test_the_shortest_prefix_lies_on_the_grid_of_blocks_and_chunks() -> None:
    for block_size, shortest in ((16, 64), (48, 192), (64, 64), (128, 128)):
        assert plan(cache={"block_size": block_size}).min_reusable_prefix == shortest


def test_a_length_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(engine={"max_model_len": 5000})
    assert "4096" in str(caught.value)


def test_on_a_gpu_everything_else_comes_off_before_kv() -> None:
    others = DeviceProcess(812, "python", 7 * GIB)
    result = plan(LARGE, gpu(80 * GIB, others, reserved=GIB // 2))
    used = 7 * GIB + GIB // 2 + CUDA_CONTEXT_BYTES + result.weight_bytes + result.activation_bytes
    assert result.memory == int(80 * GIB * 0.9) - used - result.graph_bytes
    assert result.graph_bytes > 0
    assert result.dtype == "bf16" and result.max_num_batched_tokens == 8192
    eager = plan(LARGE, gpu(80 * GIB, others, reserved=GIB // 2), graph={"enabled": False})
    assert eager.graph_bytes == 0
    assert eager.memory == result.memory + result.graph_bytes
    fewer = plan(LARGE, gpu(), graph={"max_batch": 8})
    assert 0 < fewer.graph_bytes < result.graph_bytes and fewer.max_graph_batch == 8


def test_a_share_of_the_gpu_is_a_number_or_percent() -> None:
    one, other = (
        plan(LARGE, gpu(), engine={"gpu_memory_utilization": share}) for share in (0.5, "50%")
    )
    assert one == other
    assert one.memory < plan(LARGE, gpu()).memory
    for wrong in ("150%", 0, "half"):
        with pytest.raises(ConfigError):
            plan(engine={"gpu_memory_utilization": wrong})


def test_weights_that_are_too_large_for_a_gpu_name_who_else_is_there() -> None:
    with pytest.raises(CapacityError) as caught:
        plan(LARGE, gpu(8 * GIB, DeviceProcess(812, "python", 6 * GIB)))
    assert "pid 812 (python) holds 6.00 GiB on GPU" in caught.value.why


def test_graph_sizes_rise_to_the_largest() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    for most in range(1, 70):
        sizes = graph_sizes(most)
        assert sizes[-1] == most and all(a < b for a, b in pairwise(sizes))


def test_what_cannot_be_captured_is_given_no_reserve() -> None:
    for key in ("attention_backend", "gated_delta_decode"):
        config = EngineConfig.create(engine={key: "reference"})
        plan = try_plan(LARGE, config, gpu(8 * GIB)).plan
        assert plan.max_graph_batch == plan.graph_bytes == 0
    chunks = EngineConfig.create(engine={"gated_delta_prefill": "reference"})
    assert try_plan(LARGE, chunks, gpu(8 * GIB)).plan.max_graph_batch > 0
