"""A GPU whose memory runs out while an engine starts: told as what a user can act on."""

import pytest
import torch

from minivllm_engine import LLM, EngineConfig
from minivllm_engine import llm as llm_module
from minivllm_engine.core.errors import CapacityError
from minivllm_engine.engine import out_of_memory as out_of_memory
from minivllm_engine.engine import prepare
from minivllm_engine.memory.devices import DeviceMemory, DeviceProcess, Gpu
from minivllm_engine.memory.plan import try_plan
from minivllm_engine.memory.suggest import Change, changed

GIB = 2**30
SAID = (
    "CUDA out of memory. Tried to allocate 5.16 GiB. GPU 0 has a total capacity of 24.00 GiB of which "
    "1.25 GiB is free. Of the allocated memory 3 GiB is allocated by PyTorch."
)


@pytest.fixture
def a_card_that_runs_out(monkeypatch) -> DeviceMemory:
    device = DeviceMemory("cuda", "GPU 0 NVIDIA X", 24 * GIB)
    process = DeviceProcess(812, "python", 9 * GIB)
    gpu = Gpu(0, "NVIDIA X", "1", 24 * GIB, 9 * GIB, 15 * GIB, (process,))
    monkeypatch.setattr(prepare, "choose_device", lambda options: device)
    monkeypatch.setattr(out_of_memory, "first_gpu", lambda: gpu)

    def model_runner(*args, **options) -> None:
        raise torch.OutOfMemoryError(SAID)

    monkeypatch.setattr(llm_module, "ModelRunner", model_runner)
    return device


def test_the_error_names_the_plan_the_others_and_a_smaller_share(
    tiny_model, a_card_that_runs_out
) -> None:
    config = EngineConfig.create(engine={"gpu_memory_utilization": 0.9})
    with pytest.raises(CapacityError, match="GPU memory ran out") as caught:
        LLM(tiny_model, config=config)
    error = caught.value
    assert error.why.splitlines() == [
        "planned to take 90% of GPU 0 NVIDIA X, 21.60 GiB",
        "Tried to allocate 5.16 GiB",
        "pid 812 (python) holds 9.00 GiB",
    ]
    assert error.hint == "--set engine.gpu_memory_utilization=0.72"
    assert isinstance(error.__cause__, torch.OutOfMemoryError)


def test_a_share_that_is_too_small_for_the_model_is_not_proposed(
    tiny_model, a_card_that_runs_out
) -> None:
    model_config = prepare.prepare(tiny_model, EngineConfig.create()).model_config

    def fits(share: float) -> bool:
        change = Change("engine.gpu_memory_utilization", f"{share:.2f}")
        config = changed(EngineConfig.create(), change)
        return try_plan(model_config, config, a_card_that_runs_out).ok

    least = next(percent for percent in range(1, 90) if fits(percent / 100)) / 100
    assert not fits(0.8 * least)
    config = EngineConfig.create(engine={"gpu_memory_utilization": least})
    with pytest.raises(CapacityError) as caught:
        LLM(tiny_model, config=config)
    assert caught.value.hint is None
