"""Steps by CUDA graph: decodes, captured for a few batch sizes, and prompt chunks, for a few buckets."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from minivllm_engine.models.miniqwen import MiniQwenForCausalLM
from minivllm_engine.ops.prompt_buffers import Bucket
from minivllm_engine.runner.graph_decode import GraphDecode
from minivllm_engine.runner.graph_prefill import GraphPrefill
from minivllm_engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledSequence
from minivllm_engine.tensors.cache_pool import CachePool
from minivllm_engine.tensors.device_copy import on_device
from minivllm_engine.tensors.model_input import AwaitedTokens

logger = logging.getLogger(__name__)

# Logits of what samples, until the next step, and what `greedy` gives for them.
GraphOutput = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]

# Without a graph of its own a step is padded to a multiple of this.
_GRAIN = 8


class Replayable(Protocol):
    """What was captured, and can be run again."""

    def replay(self) -> None: ...


class CudaGraphRunner:
    """Runs steps of decodes and of prompt chunks; eagerly where there is no graph, with the same result.

    A step of both is two, one after the other.

    Args:
        sizes: batch sizes of decodes to capture, ascending; () for none.
        buckets: of chunks, ascending. They are captured too, if any size is.
    """

    def __init__(
        self,
        model: MiniQwenForCausalLM,
        pool: CachePool,
        *,
        sizes: Sequence[int],
        buckets: Sequence[Bucket],
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self._sizes = tuple(sizes)
        self.static = GraphDecode(model, pool, max_batch=max_num_seqs, max_model_len=max_model_len)
        self._graphs: dict[int, Replayable] = {}
        self.prompts: GraphPrefill | None = None
        self._prompt_graphs: dict[Bucket, Replayable] = {}
        if model.operations.graph_chunks is not None and buckets:
            self.prompts = GraphPrefill(model, pool, buckets=buckets, max_model_len=max_model_len)
        self.enabled = True
        self._warned = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes that have a graph."""
        return tuple(sorted(self._graphs))

    @property
    def _buckets(self) -> tuple[Bucket, ...]:
        """The largest first: what others need fits into its memory, and kernels are tuned on it."""
        return () if self.prompts is None else self.prompts.buckets[::-1]

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile what sizes and buckets need, by running each of them once for nobody."""
        sizes = self._sizes or (1, self.static.max_batch)
        total = len(sizes) + len(self._buckets)
        for done, bucket in enumerate(self._buckets):
            if progress is not None:
                progress(done, total)
            assert self.prompts is not None
            self.prompts.load_sink(bucket)
            self.prompts.run(bucket)
        for done, size in enumerate(reversed(sizes), len(self._buckets)):
            if progress is not None:
                progress(done, total)
            self.static.load_padding(size)
            self.static.run(size)

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture a graph for each bucket and size; all share the memory of the largest."""
        if not self._sizes:
            return
        memory = torch.cuda.graph_pool_handle()
        total = len(self._sizes) + len(self._buckets)

        def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
            if progress is not None:
                progress(len(self._prompt_graphs) + len(self._graphs), total)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                run()
            return graph

        for bucket in self._buckets:
            assert self.prompts is not None
            self._prompt_graphs[bucket] = captured(partial(self.prompts.run, bucket))
        for size in reversed(self._sizes):
            self.static.load_padding(size)
            self._graphs[size] = captured(partial(self.static.run, size))

    def run(self, batch: ScheduledBatch, awaited: AwaitedTokens | None) -> GraphOutput | None:
        """Queue a step. None, and nothing is done, where it is not of these kinds."""
        cut = batch.num_decodes
        decodes, chunks = batch.sequences[:cut], batch.sequences[cut:]
        if any(sequence.scored for sequence in batch.sequences):
            return None
        if not chunks:
            return _sampling(self._decode(decodes, awaited), decodes)
        bucket = None if self.prompts is None else self.prompts.bucket_for(chunks)
        if bucket is None:
            return None
        if not decodes:
            return self._prefill(chunks, bucket)
        decoded, ended = _sampling(self._decode(decodes, awaited), decodes)
        logits, others = self._prefill(chunks, bucket)
        sampled, alive = (torch.cat(parts) for parts in zip(ended, others, strict=True))
        return torch.cat((decoded, logits)), (sampled, alive)

    def _decode(
        self, sequences: tuple[ScheduledSequence, ...], awaited: AwaitedTokens | None
    ) -> GraphOutput:
        static, count = self.static, len(sequences)
        size = self._padded(count)
        static.load(sequences, awaited, size)
        graph = self._graphs.get(size) if self.enabled else None
        if graph is None:
            static.run(size)
        else:
            graph.replay()
        return static.logits[:count], (static.sampled[:count], static.alive[:count])

    def _prefill(self, sequences: tuple[ScheduledSequence, ...], bucket: Bucket) -> GraphOutput:
        assert self.prompts is not None
        prompts = self.prompts
        count = prompts.load(sequences, bucket)
        graph = self._prompt_graphs.get(bucket) if self.enabled else None
        if graph is None:
            prompts.run(bucket)
        else:
            graph.replay()
        return prompts.logits[:count], (prompts.sampled[:count], prompts.alive[:count])

    def _padded(self, count: int) -> int:
        """The batch size to compute. The same with and without graphs: products then round alike."""
        for size in self._sizes:
            if count <= size:
                return size
        if self._sizes and not self._warned:
            self._warned = True
            logger.warning(
                "steps of %d sequences run without a CUDA graph: graph.max_batch is %d",
                count,
                self._sizes[-1],
            )
        return min(-(-count // _GRAIN) * _GRAIN, self.static.max_batch)


def _sampling(output: GraphOutput, sequences: tuple[ScheduledSequence, ...]) -> GraphOutput:
    """Of what a step gives for all of its sequences, that of those which sample.

    A single token may also be a piece of a prompt, whose logits nobody wants.
    """
    rows = [row for row, sequence in enumerate(sequences) if sequence.samples]
    logits, (sampled, alive) = output
    if len(rows) == len(sequences):
        return output
    index = on_device(rows, torch.int64, logits.device)
    return logits.index_select(0, index), (
        sampled.index_select(0, index),
        alive.index_select(0, index),
    )
