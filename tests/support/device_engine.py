"""Engines as they run on a GPU, for checks that also run without one.

On a CPU the operations stand in for the kernels (`graph_reference`, or the kernels themselves in Triton's
interpreter), steps are launched ahead as on a GPU, and "graphs" are the static step, run again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from minivllm_engine import LLM, EngineConfig
from minivllm_engine.core.config import EngineOptions
from minivllm_engine.memory.device_choice import choose_device
from minivllm_engine.memory.devices import DeviceMemory
from minivllm_engine.memory.sizes import graph_sizes
from minivllm_engine.ops.operations import Operations
from minivllm_engine.ops.prompt_buffers import Bucket
from support.poison import NAN

GIB = 2**30


@dataclass(frozen=True)
class Rig:
    """Makes engines on one kind of device.

    Attributes:
        operations: what the CPU computes with; None on a GPU, which has its own.
    """

    device: str
    operations: Operations | None = None

    def engine(
        self,
        model: Any,
        *,
        largest_graph: int = 8,
        block_size: int = 16,
        num_blocks: int = 600,
        prefix_cache: bool = True,
        poisoned: bool = True,
        share: int = 8 * GIB,
        **options: Any,
    ) -> LLM:
        """An engine with graphs for batches up to `largest_graph` (0: none), its pools full of NaN.

        In fp32 prompts are computed by the reference rule unless said otherwise: FLA multiplies in TF32.

        Args:
            share: bytes of the GPU that the engine takes for all there is. Many tests run at once.
            options: of the section `engine`.
        """
        engine = {"max_num_seqs": 8, "max_num_batched_tokens": 2048, "dtype": "fp32"}
        engine["max_model_len"] = min(2048, num_blocks * block_size)
        cache = {"block_size": block_size, "num_blocks": num_blocks, "prefix_cache": prefix_cache}
        cache["snapshot_memory"] = "8MiB"
        if self.device == "cpu":
            engine["cpu_memory"] = "64MiB"
        elif options.get("dtype", "fp32") == "fp32":
            engine["gated_delta_prefill"] = "reference"
        config = EngineConfig.create(
            engine={**engine, "device": self.device, **options},
            cache=cache,
            graph={"max_batch": largest_graph} if largest_graph else {"enabled": False},
        )
        if self.operations is None:
            with share_of_card(share):
                llm = LLM(model, config=config)
        else:
            with _computing_with(self.operations):
                llm = LLM(model, config=config)
            llm._loop.overlap = True
            if largest_graph:
                imitate_graphs(llm, largest_graph)
        if poisoned:
            llm._loop.runner.pool.fill_(NAN)
        return llm


@contextmanager
def share_of_card(num_bytes: int) -> Iterator[None]:
    """Within, the planner takes the GPU for one with so much memory and nobody else on it."""

    def choose(options: EngineOptions) -> DeviceMemory:
        return replace(choose_device(options), total=num_bytes, processes=(), reserved=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minivllm_engine.engine.prepare.choose_device", choose)
        patch.setattr("minivllm_engine.engine.prepare.choose_device", choose)
        yield


@contextmanager
def _computing_with(operations: Operations) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "minivllm_engine.runner.model_runner.choose_operations", lambda *_: operations
        )
        yield


def imitate_graphs(llm: LLM, largest: int) -> None:
    """Give an engine on a CPU something that is replayed where a GPU replays a graph."""
    runner = llm._loop.runner
    decodes = runner.graphs
    assert decodes is not None and not decodes.sizes
    sizes = graph_sizes(min(largest, llm._plan.max_num_seqs))
    decodes._sizes = sizes
    decodes._graphs = {size: _Again(decodes.static.run, size) for size in sizes}
    prompts = decodes.prompts
    if prompts is not None:
        decodes._prompt_graphs = {size: _Again(prompts.run, size) for size in prompts.buckets}
    runner.load_report = replace(runner.load_report, graph_sizes=sizes)


@dataclass(frozen=True)
class _Again:
    run: Callable[[Any], None]
    size: int | Bucket

    def replay(self) -> None:
        with torch.inference_mode():
            self.run(self.size)
