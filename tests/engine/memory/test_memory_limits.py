"""How far `max_num_seqs` can go: beyond one limit it is refused, beyond the other something is lowered."""

import random
from collections import Counter

from engine.memory.test_memory_plan import DEMO, GIB, LARGE, gpu
from engine.memory.test_memory_plan_refusals import random_case
from minivllm_engine.core.config import EngineConfig
from minivllm_engine.memory.devices import DeviceMemory, host_memory
from minivllm_engine.memory.plan import planner_of
from minivllm_engine.memory.suggest import Limit, refused_above, unlowered_max_num_seqs, with_engine
from minivllm_engine.model_config.config import ModelConfig
from support.qwen35_08b import CONFIG


def limits(
    model: ModelConfig, device: DeviceMemory, **sections: dict[str, object]
) -> tuple[Limit, Limit]:
    planner, config = planner_of(model, device), EngineConfig.create(**sections)
    return refused_above(config, planner), unlowered_max_num_seqs(config, planner(config), planner)


def test_the_limit_and_the_planner_agree_on_every_configuration() -> None:
    rng, bounds = random.Random(11), Counter[str | None]()
    for _ in range(300):
        model, device, config = random_case(rng)
        planner = planner_of(model, device)
        limit = refused_above(config, planner)
        bounds[limit.bound_by] += 1
        if limit.value:
            assert planner(with_engine(config, max_num_seqs=limit.value)).ok
        assert not planner(with_engine(config, max_num_seqs=limit.value + 1)).ok
    assert min(bounds["state"], bounds["kv"]) > 20


def test_up_to_the_lower_limit_nothing_gives_way() -> None:
    rng, bounds = random.Random(12), Counter[str | None]()
    for _ in range(300):
        model, device, config = random_case(rng)
        planner = planner_of(model, device)
        result = planner(config)
        limit = unlowered_max_num_seqs(config, result, planner)
        assert limit.value <= refused_above(config, planner).value
        if not result.ok or not limit.value:
            continue
        bounds[limit.bound_by] += 1
        lowered = {one.key for one in result.lowered} | {"engine.cpu_memory"}
        at_length = with_engine(config, max_model_len=result.plan.max_model_len)
        at = planner(with_engine(at_length, max_num_seqs=limit.value))
        assert at.ok and {one.key for one in at.lowered} <= lowered
        assert at.plan.num_blocks >= limit.value
        beyond = planner(with_engine(at_length, max_num_seqs=limit.value + 1))
        few_blocks = beyond.plan.num_blocks <= limit.value
        assert not beyond.ok or few_blocks or {one.key for one in beyond.lowered} - lowered
    assert bounds["kv"] > 20 and bounds["snapshots"] > 5


def test_the_bound_is_the_pool_that_is_full() -> None:
    refused, _ = limits(LARGE, gpu(8 * GIB))
    assert refused.bound_by == "state"
    refused, _ = limits(LARGE, gpu(8 * GIB), engine={"max_model_len": 200_000})
    assert refused.bound_by == "kv"
    _, unlowered = limits(DEMO, host_memory(16 * GIB), cache={"num_blocks": 9})
    assert unlowered == Limit(9, "kv")
    _, unlowered = limits(LARGE, gpu(8 * GIB))
    assert unlowered.bound_by == "snapshots"


def test_where_sequences_take_no_state_any_number_fits() -> None:
    text = CONFIG["text_config"] | {"layer_types": ["full_attention"] * 24}
    attention = ModelConfig.from_dict({**CONFIG, "text_config": text}, "config.json")
    assert attention.num_linear_layers == 0
    refused, _ = limits(attention, host_memory(16 * GIB))
    assert refused.bound_by is None
