"""The reference operations on a CUDA device: the same logits as on the CPU.

They are what kernels will be compared with, so they must be right where the kernels run.
"""

from dataclasses import replace

import pytest
import torch

from minivllm_engine.cache.block_manager import BlockManager
from minivllm_engine.cache.deltanet_state import DeltaNetStateManager
from minivllm_engine.cache.prefix_cache import PrefixCache
from minivllm_engine.checkpoint.index import CheckpointIndex
from minivllm_engine.core.config import EngineConfig
from minivllm_engine.core.request import Request
from minivllm_engine.core.sampling_params import ResolvedSampling
from minivllm_engine.memory.devices import DeviceMemory
from minivllm_engine.memory.plan import plan_memory
from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.ops.reference_backend import REFERENCE
from minivllm_engine.runner.model_runner import ModelRunner
from minivllm_engine.scheduling.scheduler import Scheduler

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("budget", [7, 64, 2048])
def test_logits_of_mixed_batches_equal_those_of_the_cpu(tiny_model, budget: int) -> None:
    config = ModelConfig.from_dir(tiny_model)
    index = CheckpointIndex.open(tiny_model)
    options = EngineConfig.create(engine={"max_num_seqs": 4}, cache={"block_size": 16})
    plan = plan_memory(config, options, 8 * 2**30)
    gpu = replace(plan, device=DeviceMemory("cuda", "GPU", 2**33))
    on = {"options": options.engine, "operations": REFERENCE}
    runners = [ModelRunner(index, config, one, **on) for one in (plan, gpu)]
    for runner in runners:
        runner.pool.fill_(float("nan"))
    cache = PrefixCache(BlockManager(plan.num_blocks, 16), DeltaNetStateManager(4), enabled=False)
    scheduler = Scheduler(cache, max_num_batched_tokens=budget)
    generator = torch.Generator().manual_seed(0)
    params = ResolvedSampling(seed=0, max_tokens=6)
    for number, length in enumerate([1, 3, 63, 64, 65, 130]):
        prompt = torch.randint(0, config.vocab_size, (length,), generator=generator).tolist()
        scheduler.add(Request(str(number), tuple(prompt), params, number, 0, length + 6))
    compared = 0
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        on_cpu, on_gpu = (runner.run(batch).logits.float().cpu() for runner in runners)
        torch.testing.assert_close(on_gpu, on_cpu, atol=5e-4, rtol=0)
        best = iter(on_cpu.argmax(-1).tolist())
        scheduler.commit(batch, [next(best) if s.samples else None for s in batch.sequences])
        compared += len(on_cpu)
        for request in [r for r in scheduler.running if r.num_tokens == r.max_total_tokens]:
            scheduler.finish(request)
    assert compared == 36
