"""Steps by CUDA graph: of decodes, captured for a few batch sizes, and of what is left of a cached prompt."""

import logging
from collections.abc import Callable, Sequence

import torch

from minivllm_engine.models.miniqwen import MiniQwenForCausalLM
from minivllm_engine.runner.graph_decode import GraphDecode
from minivllm_engine.runner.graph_prefill import GraphPrefill
from minivllm_engine.scheduling.scheduled_batch import ScheduledBatch
from minivllm_engine.tensors.cache_pool import CachePool
from minivllm_engine.tensors.model_input import AwaitedTokens

logger = logging.getLogger(__name__)

# Logits of what samples, until the next step, and what `greedy` gives for them.
GraphOutput = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]

# Without a graph of its own a step is padded to a multiple of this.
_GRAIN = 8


class CudaGraphRunner:
    """Runs steps of decodes, and of one short chunk; eagerly where there is no graph, with the same result.

    Args:
        sizes: batch sizes to capture, ascending; () for none.
    """

    def __init__(
        self,
        model: MiniQwenForCausalLM,
        pool: CachePool,
        *,
        sizes: Sequence[int],
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self._sizes = tuple(sizes)
        self.static = GraphDecode(model, pool, max_batch=max_num_seqs, max_model_len=max_model_len)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._prompt: GraphPrefill | None = None
        self._prompt_graph: torch.cuda.CUDAGraph | None = None
        if model.operations.graph_chunk is not None:
            self._prompt = GraphPrefill(model, pool, max_model_len=max_model_len)
        self.enabled = True
        self._warned = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes that have a graph."""
        return tuple(sorted(self._graphs))

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile what the sizes need, by running each of them once with nobody in it."""
        sizes = self._sizes or (1, self.static.max_batch)
        for done, size in enumerate(reversed(sizes)):
            if progress is not None:
                progress(done, len(sizes))
            self.static.load_padding(size)
            self.static.run(size)
        if self._prompt is not None:
            self._prompt.load_padding()
            self._prompt.run()

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture a graph for each size, the largest first, so that the others fit into its memory."""
        memory = torch.cuda.graph_pool_handle()
        for done, size in enumerate(reversed(self._sizes)):
            if progress is not None:
                progress(done, len(self._sizes))
            self.static.load_padding(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                self.static.run(size)
            self._graphs[size] = graph
        if self._sizes and self._prompt is not None:
            torch.cuda.synchronize()
            self._prompt_graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._prompt_graph, pool=memory):
                self._prompt.run()

    def run(self, batch: ScheduledBatch, awaited: AwaitedTokens | None) -> GraphOutput | None:
        """Queue a step that is of one of these kinds. None, and nothing is done, where it is not."""
        count = len(batch.sequences)
        # A single token may also be a piece of a prompt, whose logits nobody wants.
        if batch.num_decodes == count and all(s.samples for s in batch.sequences):
            static, size = self.static, self._padded(count)
            static.load(batch, awaited, size)
            graph = self._graphs.get(size) if self.enabled else None
            if graph is None:
                static.run(size)
            else:
                graph.replay()
            return static.logits[:count], (static.sampled[:count], static.alive[:count])
        prompt = self._prompt
        if prompt is None or not prompt.takes(batch):
            return None
        prompt.load(batch)
        if self._prompt_graph is None or not self.enabled:
            prompt.run()
        else:
            self._prompt_graph.replay()
        count = int(batch.sequences[0].samples)
        return prompt.logits[:count], (prompt.sampled[:count], prompt.alive[:count])

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
