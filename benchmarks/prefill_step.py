"""How long a step of prompts takes on the card: replayed as a CUDA graph, and launched by the host.

    python benchmarks/prefill_step.py [--shape 0.8b] [--steps 1x128 1x2048 8x1024 ...] [--profile] [--smoke]

A step is so many new prompts of so many tokens, with random weights. Of each: the bucket it is padded to; a
replay of its graph (GPU time); the same launches by the host (until the GPU is done); and the step as it is
built anew, without a bucket. Medians. The graph must give the bits of its launches; against the step that
is built anew, the largest difference of a logit is printed. --profile: kernels of each replay, by time.
--smoke: tiny, on a CPU, in Triton's interpreter and without graphs, to see that it runs.
"""

import argparse
import os
import statistics
from collections.abc import Callable

import torch

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from step_time import device_seconds, host_seconds, model_of

from minivllm_engine.core.request import Request
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.memory.sizes import prompt_buckets
from minivllm_engine.model_config.shapes import SHAPES
from minivllm_engine.models.miniqwen import MiniQwenForCausalLM
from minivllm_engine.ops.prompt_buffers import Bucket
from minivllm_engine.runner.graph_prefill import GraphPrefill
from minivllm_engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledSequence
from minivllm_engine.tensors.cache_pool import CachePool
from minivllm_engine.tensors.model_input import build_model_input

_BLOCK_SIZE = 64
_REPEATS = 15
_STEPS = ("1x64", "1x128", "1x512", "1x2048", "16x64", "16x128", "1x8192", "8x1024", "64x128")


class Prompts:
    """A step of new prompts over a pool of their own."""

    def __init__(self, model: MiniQwenForCausalLM, count: int, length: int) -> None:
        blocks = -(-length // _BLOCK_SIZE)
        self.model = model
        self.pool = CachePool(
            model.config,
            num_slots=count,
            num_blocks=count * blocks,
            block_size=_BLOCK_SIZE,
            dtype=model.dtype,
            state_dtype=torch.float32,
            device=model.device,
        )
        params = SamplingParams.create().resolved(seed=0)
        generator = torch.Generator().manual_seed(length)
        sequences = []
        for i in range(count):
            ids = torch.randint(0, model.config.vocab_size, (length,), generator=generator)
            table = tuple(range(i * blocks, (i + 1) * blocks))
            request = Request(str(i), tuple(ids.tolist()), params, arrival=i)
            sequences.append(ScheduledSequence(request, 0, length, table, i, samples=True))
        self.batch = ScheduledBatch(tuple(sequences), 0)
        sizes = prompt_buckets(max(8192, count * length), max(count, 8))
        self.bucket = next(
            Bucket(*size) for size in sizes if size[0] >= count * length and size[1] >= count
        )
        self.static = GraphPrefill(
            model, self.pool, buckets=[self.bucket], max_model_len=blocks * _BLOCK_SIZE
        )

    def load(self) -> None:
        self.static.load(self.batch.sequences, self.bucket)

    def launch(self) -> None:
        self.load()
        self.static.run(self.bucket)

    def build_anew(self) -> torch.Tensor:
        return self.model(build_model_input(self.batch, self.pool), self.pool)

    def captured(self) -> Callable[[], None]:
        """Replays a graph of the step."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.static.run(self.bucket)
        return graph.replay

    def logits_of(self, call: Callable[[], object]) -> torch.Tensor:
        for tensor in self.pool.tensors():
            tensor.fill_(float("nan"))
        call()
        return self.static.logits[: len(self.batch.sequences)].clone()


def median_ms(clock: Callable[[Callable[[], object]], float], call: Callable[[], object]) -> float:
    times = [clock(call) for _ in range(_REPEATS + 3)]
    return 1000 * statistics.median(times[3:])


def profiled(replay: Callable[[], None]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)
    total = sum(event.device_time_total for event in events)
    print(f"    {total / 1000:.2f} ms in {sum(event.count for event in events)} kernels")
    for event in events[:22]:
        print(f"    {event.device_time_total / 1000:8.3f} ms {event.count:5} {event.key[:90]}")


def measure(prompts: Prompts, profile: bool) -> str:
    on_card = prompts.pool.device.type == "cuda"
    anew = prompts.build_anew().float()
    prompts.launch()
    launched = prompts.logits_of(prompts.launch)
    difference = (anew - launched.float()).abs().max().item()
    assert launched.isfinite().all(), "not finite"
    if not on_card:
        return f"largest difference {difference:.2g}"
    replay = prompts.captured()
    if not torch.equal(prompts.logits_of(replay), launched):
        raise SystemExit("a replay gives other logits than its launches")
    times = (
        median_ms(device_seconds, replay),
        median_ms(host_seconds, prompts.load),
        median_ms(host_seconds, prompts.launch),
        median_ms(host_seconds, prompts.build_anew),
    )
    if profile:
        profiled(replay)
    text = " ".join(f"{time:9.3f}" for time in times)
    return f"{text} {difference:9.2g} of {anew.abs().max():.2g}"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.8b")
    parser.add_argument("--steps", nargs="+")
    parser.add_argument("--profile", nargs="*", default=[])
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    if not arguments.smoke and not torch.cuda.is_available():
        parser.error("no CUDA device: only --smoke runs without one")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model_of(arguments.shape, arguments.smoke, device)
    # FLA tunes its kernels on what it sees first, and not here: there is none on a CPU.
    if device.type == "cuda":
        Prompts(model, 8, 1024).launch()
    print("prompts     bucket      graph ms   load ms launch ms   anew ms      diff", flush=True)
    for step in arguments.steps or (["1x5"] if arguments.smoke else _STEPS):
        count, length = map(int, step.split("x"))
        prompts = Prompts(model, count, length)
        name = "{} x {}".format(*prompts.bucket)
        print(f"{step:11} {name:10}", measure(prompts, step in arguments.profile), flush=True)


if __name__ == "__main__":
    main()
