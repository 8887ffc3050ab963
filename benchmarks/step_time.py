"""How long a decode step takes on the card, and what of that kernels save that start early.

    python benchmarks/step_time.py [--shape 0.8b] [--batch 1 2 4 8 32 256] [--context 512] [--smoke]

A model of random weights over live sequences, each at the end of a context of its own in the cache. Of each
batch size: a replay of the step's CUDA graph with kernels that start early, and with ones that do not, in
turn; the step launched by the host; and the fraction that reading and writing what a step must, at the
device's measured bandwidth, would take of the first. Medians. Both graphs must give the same bits.
--smoke: tiny, on a CPU, in Triton's interpreter and without graphs, to see that it runs.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from minivllm_engine.checkpoint.random_weights import RandomWeights
from minivllm_engine.core.request import Request
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.memory.roofline import decode_step_bytes
from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.model_config.shapes import SHAPES, shape_config
from minivllm_engine.models.miniqwen import MiniQwenForCausalLM
from minivllm_engine.ops import device as device_rules
from minivllm_engine.ops.kernel_backend import kernel_operations
from minivllm_engine.runner.bandwidth import read_bandwidth
from minivllm_engine.runner.graph_decode import GraphDecode
from minivllm_engine.runner.weights import fill_weights
from minivllm_engine.scheduling.scheduled_batch import ScheduledSequence
from minivllm_engine.tensors.cache_pool import CachePool

_BLOCK_SIZE = 64
_REPEATS = 30
_SMOKE_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@contextmanager
def starting_early(can: bool) -> Iterator[None]:
    """Kernels start early where the card can, or none does."""
    before = device_rules.has_dependent_launch
    if not can:
        device_rules.has_dependent_launch = lambda device: False
    try:
        yield
    finally:
        device_rules.has_dependent_launch = before


class LiveStep:
    """A decode step of `batch` sequences over a pool of their own, filled with random numbers."""

    def __init__(self, model: MiniQwenForCausalLM, batch: int, context: int) -> None:
        blocks = context // _BLOCK_SIZE + 1
        self.pool = CachePool(
            model.config,
            num_slots=batch,
            num_blocks=batch * blocks,
            block_size=_BLOCK_SIZE,
            dtype=model.dtype,
            state_dtype=torch.float32,
            device=model.device,
        )
        self.batch = batch
        self.static = GraphDecode(
            model, self.pool, max_batch=batch, max_model_len=_BLOCK_SIZE * blocks
        )
        params = SamplingParams.create().resolved(seed=0)
        sequences = []
        for i in range(batch):
            prompt = (i % model.config.vocab_size,) * (context + 1)
            table = tuple(range(i * blocks, (i + 1) * blocks))
            request = Request(str(i), prompt, params, arrival=i)
            sequences.append(ScheduledSequence(request, context, 1, table, i, samples=True))
        self.static.load(tuple(sequences), None, batch)

    def refill(self) -> None:
        """Put the caches back to where they were."""
        generator = torch.Generator(self.pool.device).manual_seed(0)
        for tensor in self.pool.tensors():
            tensor.normal_(generator=generator)

    def run(self) -> None:
        self.static.run(self.batch)

    def captured(self) -> Callable[[], None]:
        """Replays a graph of the step."""
        self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph.replay

    def logits_of(self, call: Callable[[], None], steps: int = 3) -> torch.Tensor:
        """After some steps from the same beginning, so that the caches count too."""
        self.refill()
        for _ in range(steps):
            call()
        return self.static.logits.clone()


@dataclass(frozen=True)
class Times:
    """Seconds of a step: captured with kernels that start early and with ones that do not, and launched."""

    early: float
    ordered: float
    eager: float


def measure(step: LiveStep) -> Times:
    step.refill()
    if step.pool.device.type == "cpu":
        seconds = host_seconds(step.run)
        return Times(seconds, seconds, seconds)
    replays = []
    for early in (True, False):
        with starting_early(early):
            replays.append(step.captured())
    first, second = (step.logits_of(replay) for replay in replays)
    if not torch.equal(first, second):
        raise SystemExit(f"batch {step.batch}: starting early changes the logits")
    step.refill()
    times: list[list[float]] = [[], [], []]
    for number in range(_REPEATS + 3):
        for kept, call in zip(times, (*replays, step.run), strict=True):
            clock = host_seconds if call == step.run else device_seconds
            seconds = clock(call)
            if number >= 3:  # the first ones warm up
                kept.append(seconds)
    return Times(*(statistics.median(kept) for kept in times))


def device_seconds(call: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def host_seconds(call: Callable[[], None]) -> float:
    """Until the device is done."""
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def model_of(shape: str, smoke: bool, device: torch.device) -> MiniQwenForCausalLM:
    config = shape_config(shape) | (_SMOKE_SIZES if smoke else {})
    model = MiniQwenForCausalLM(
        ModelConfig.from_dict(config, "config.json"),
        kernel_operations(),
        dtype=torch.bfloat16,
        device=device,
    )
    fill_weights(model, RandomWeights())
    return model


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.8b")
    parser.add_argument("--batch", type=int, nargs="+")
    parser.add_argument("--context", type=int)
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    if not arguments.smoke and not torch.cuda.is_available():
        parser.error("no CUDA device: only --smoke runs without one")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batches = arguments.batch or ([1, 3] if arguments.smoke else [1, 2, 4, 8, 32, 256])
    context = arguments.context or (70 if arguments.smoke else 512)
    model = model_of(arguments.shape, arguments.smoke, device)
    bandwidth = read_bandwidth(device.type)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, interpreted"
    print(
        f"{name}, torch {torch.__version__}, reads {bandwidth / 1e12:.3f} TB/s, context {context}"
    )
    print(f"{'batch':>5} {'early ms':>9} {'not ms':>9} {'saved':>6} {'eager ms':>9} {'limit':>6}")
    for batch in batches:
        times = measure(LiveStep(model, batch, context))
        tied = model.head is model.embedding
        moved = decode_step_bytes(
            model.config, "bf16", "fp32", batch=batch, context=context, tied=tied
        )
        saved, fraction = 1 - times.early / times.ordered, moved / bandwidth / times.early
        numbers = f"{times.early * 1e3:9.4f} {times.ordered * 1e3:9.4f} {saved:6.1%}"
        print(f"{batch:5} {numbers} {times.eager * 1e3:9.4f} {fraction:6.1%}", flush=True)


if __name__ == "__main__":
    main()
