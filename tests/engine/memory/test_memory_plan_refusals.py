"""What does not fit is refused with the smallest changes that work, each accepted by the planner."""

import random
from collections import Counter

import pytest

from engine.memory.test_memory_plan import DEMO, GIB, LARGE, MIB, gpu, plan
from minivllm_engine.core.config import EngineConfig
from minivllm_engine.core.errors import CapacityError, ConfigError
from minivllm_engine.memory.devices import DeviceMemory, DeviceProcess, host_memory
from minivllm_engine.memory.plan import plan_memory, try_plan
from minivllm_engine.memory.suggest import Change, changed
from minivllm_engine.model_config.config import ModelConfig


def changes_in(hint: str) -> list[Change]:
    """The changes of a printed hint: `--set a=1, or --set c=3`."""
    parts = (part.removeprefix("--set ").partition("=") for part in hint.split(", or "))
    return [Change(key, value) for key, _, value in parts]


def refused(
    model: ModelConfig, memory: DeviceMemory | int, config: EngineConfig
) -> CapacityError | None:
    try:
        plan_memory(model, config, memory)
    except CapacityError as error:
        return error
    return None


def random_case(rng: random.Random) -> tuple[ModelConfig, DeviceMemory, EngineConfig]:
    model = rng.choice([DEMO, LARGE])
    total = int(2 ** rng.uniform(28, 34))
    others = tuple(
        DeviceProcess(pid, "python", int(total * rng.uniform(0, 0.6)))
        for pid in range(rng.randrange(2))
    )
    device = rng.choice([host_memory(total), DeviceMemory("cuda", "GPU", total, others)])
    positions = model.max_position_embeddings
    engine = {
        "max_num_seqs": int(2 ** rng.uniform(0, 14)),
        "max_model_len": int(min(positions, 2 ** rng.uniform(4, 18))),
        "cpu_memory": int(2 ** rng.uniform(20, 35)),
        "max_num_batched_tokens": int(2 ** rng.uniform(4, 16)),
        "dtype": rng.choice(["fp32", "bf16"]),
        "gpu_memory_utilization": rng.uniform(0.1, 1),
    }
    cache = {
        "num_blocks": int(2 ** rng.uniform(0, 16)),
        "snapshot_memory": int(2 ** rng.uniform(18, 34)),
        "block_size": 16 * rng.randrange(1, 9),
        "prefix_cache": rng.random() < 0.8,
    }
    kept = [{k: v for k, v in part.items() if rng.random() < 0.5} for part in (engine, cache)]
    return model, device, EngineConfig.create(engine=kept[0], cache=kept[1])


def test_k15_the_planner_accepts_every_printed_suggestion() -> None:
    rng = random.Random(0)
    outcomes: Counter[str] = Counter()
    for _ in range(200):
        model, device, config = random_case(rng)
        error = refused(model, device, config)
        if error is None:
            outcomes["fits"] += 1
            continue
        outcomes["refused"] += 1
        if error.hint is None:
            continue
        outcomes["with remedies"] += 1
        for change in changes_in(error.hint):
            outcomes["remedies"] += 1
            again = refused(model, device, changed(config, change))
            assert again is None, f"{config} on {device}: {change}: {again}"
    assert outcomes["fits"] > 20
    assert outcomes["with remedies"] > 40


def test_k15_a_length_beyond_the_positions_comes_with_ones_that_fit() -> None:
    rng = random.Random(2)
    outcomes: Counter[str] = Counter()
    for _ in range(100):
        model, device, config = random_case(rng)
        beyond = str(model.max_position_embeddings + 1)
        with pytest.raises(ConfigError) as caught:
            plan_memory(model, changed(config, Change("engine.max_model_len", beyond)), device)
        hint = caught.value.hint
        outcomes["silent" if hint is None else "with remedies"] += 1
        for change in changes_in(hint) if hint else ():
            assert change.key == "engine.max_model_len"
            outcomes["shorter"] += int(change.value) < model.max_position_embeddings
            again = refused(model, device, changed(config, change))
            assert again is None, f"{config} on {device}: {change}: {again}"
    assert outcomes["with remedies"] > 20
    assert outcomes["shorter"] > 5


def test_nothing_is_suggested_only_where_no_single_change_helps() -> None:
    rng = random.Random(1)
    silent = 0
    for _ in range(200):
        model, device, config = random_case(rng)
        error = refused(model, device, config)
        if error is None or error.hint is not None:
            continue
        silent += 1
        for text in ("engine.max_num_seqs=1", "engine.max_model_len=2", "engine.dtype=bf16"):
            key, _, value = text.partition("=")
            section, _, name = key.partition(".")
            if name == "dtype" or getattr(getattr(config, section), name) is not None:
                assert not try_plan(model, changed(config, Change(key, value)), device).ok
    assert silent > 5


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
        (LARGE, {"cpu_memory": "1GiB"}, {"snapshot_memory": "2GiB"}),
        (LARGE, {"cpu_memory": "1GiB"}, {"num_blocks": 100_000}),
        (LARGE, {"cpu_memory": "64GiB"}, {}),
    ],
)
def test_f1_a_value_that_was_set_is_refused_with_ones_that_fit(model, engine, cache) -> None:
    with pytest.raises(CapacityError) as caught:
        plan(model, engine=engine, cache=cache)
    config = EngineConfig.create(engine=engine, cache=cache)
    remedies = changes_in(caught.value.hint)
    assert 1 <= len(remedies) <= 3
    for change in remedies:
        assert refused(model, 16 * GIB, changed(config, change)) is None


@pytest.mark.parametrize("device", [16 * GIB, gpu(24 * GIB)], ids=["cpu", "cuda"])
def test_k14_too_many_sequences_name_the_pool_and_the_largest_value(device) -> None:
    with pytest.raises(CapacityError) as caught:
        plan(LARGE, device, engine={"max_num_seqs": 5000})
    assert caught.value.what.startswith("max_num_seqs 5000 needs 5000 state slots (")
    first = changes_in(caught.value.hint)[0]
    key, value = first.key, first.value
    assert key == "engine.max_num_seqs"
    assert caught.value.what.endswith(f"; {value} fit")
    assert plan(LARGE, device, engine={"max_num_seqs": int(value)}).max_num_seqs == int(value)
    with pytest.raises(CapacityError):
        plan(LARGE, device, engine={"max_num_seqs": int(value) + 1})


def test_the_smallest_change_is_the_one_that_is_offered() -> None:
    config = {"max_model_len": 200_000, "cpu_memory": "1GiB", "max_num_seqs": 4}
    with pytest.raises(CapacityError) as caught:
        plan(LARGE, engine=config)
    values = {change.key: change.value for change in changes_in(caught.value.hint)}
    longest = int(values["engine.max_model_len"])
    assert plan(LARGE, engine={**config, "max_model_len": longest}).max_model_len == longest
    with pytest.raises(CapacityError):
        plan(LARGE, engine={**config, "max_model_len": longest + 1})
    least = int(values["engine.cpu_memory"].removesuffix("MiB")) * MIB
    assert plan(LARGE, engine={**config, "cpu_memory": least}).memory == least
    with pytest.raises(CapacityError):
        plan(LARGE, engine={**config, "cpu_memory": least - MIB})


def test_where_nothing_helps_nothing_is_suggested() -> None:
    with pytest.raises(CapacityError) as caught:
        plan(LARGE, GIB, engine={"max_num_seqs": 4})
    assert caught.value.hint is None
    assert "weights 2.80 GiB" in caught.value.why


def test_a_gpu_is_not_refused_for_what_a_cpu_may_take() -> None:
    """engine.cpu_memory says nothing about a GPU. The parts that are named come to what is needed."""
    config = EngineConfig.create(engine={"cpu_memory": 4 * GIB})
    error = refused(DEMO, DeviceMemory("cuda", "GPU", GIB), config)
    assert error is not None and error.why is not None
    assert "cpu_memory" not in str(error)
    parts = error.why.partition(";")[0].split(", ")
    units = {"KiB": 2**10, "MiB": MIB, "GiB": GIB}
    sizes = [float(part.split()[-2]) * units[part.split()[-1]] for part in parts]
    number, unit = error.what.split()[1:3]
    assert "CUDA and its libraries" in parts[0] and len(sizes) == 5
    assert sum(sizes) == pytest.approx(float(number) * units[unit], rel=0.01)
