"""A step of one short chunk of a prompt over buffers that stay where they are, for a CUDA graph.

It is what is left of a prompt that the prefix cache has: its launches, one by one, take the host longer than
the GPU. Rows past the chunk's end are computed and mean nothing; they are written nowhere that counts.
"""

import numpy as np
import torch

from minivllm_engine.models.layers.step_plan import DeltaPlan, StepPlan, kv_shape
from minivllm_engine.models.miniqwen import MiniQwenForCausalLM
from minivllm_engine.ops.operations import ChunkBuffers
from minivllm_engine.runner.graph_decode import HostNumbers
from minivllm_engine.scheduling.scheduled_batch import ScheduledBatch
from minivllm_engine.tensors.cache_pool import CachePool

MAX_TOKENS = 64
_NOTHING = -1


class GraphPrefill:
    """The buffers of a chunk of up to MAX_TOKENS tokens of one sequence, and the step itself.

    Attributes:
        logits: [1, vocab_size], of the chunk's last token.
        sampled, alive: [1], what `greedy` gives for them.
    """

    def __init__(self, model: MiniQwenForCausalLM, pool: CachePool, *, max_model_len: int) -> None:
        graph_chunk = model.operations.graph_chunk
        assert graph_chunk is not None
        self.model, self.pool = model, pool
        device, pinned = model.device, model.device.type == "cuda"
        max_blocks = -(-max_model_len // pool.block_size)
        self._buffers = ChunkBuffers(MAX_TOKENS, max_blocks, device)
        shape = kv_shape(model.config, pool.block_size)
        self._plans = graph_chunk(self._buffers, shape, model.dtype)
        self.logits = torch.zeros(1, model.config.vocab_size, dtype=model.dtype, device=device)
        self.sampled = torch.zeros(1, dtype=torch.int64, device=device)
        self.alive = torch.zeros(1, dtype=torch.bool, device=device)
        size = len(self._buffers.numbers)
        self._host = [HostNumbers((size,), pinned=pinned) for _ in range(2)]
        self.load_padding()

    @staticmethod
    def takes(batch: ScheduledBatch) -> bool:
        """Say whether this is a step of one short chunk, and of nothing else."""
        if len(batch.sequences) != 1 or batch.num_decodes:
            return False
        (sequence,) = batch.sequences
        return sequence.length <= MAX_TOKENS and not sequence.scored

    def load(self, batch: ScheduledBatch) -> None:
        """Queue the copy of a step's numbers."""
        (sequence,) = batch.sequences
        start, end = sequence.start, sequence.start + sequence.length
        positions = np.arange(start, end)
        table = np.array(sequence.block_table, dtype=np.int32)
        size = self.pool.block_size
        self._load(
            np.array(sequence.request.token_ids(start, end)),
            positions,
            table[positions // size] * size + positions % size,
            sequence.slot,
            table,
        )

    def load_padding(self) -> None:
        """Queue the copy of a chunk of one token that goes to the sinks."""
        sink = np.array([self.pool.sink_block], dtype=np.int32)
        zero = np.zeros(1, dtype=np.int32)
        self._load(zero, zero, sink * self.pool.block_size, self.pool.sink_slot, sink)

    def _load(
        self,
        token_ids: np.ndarray,
        positions: np.ndarray,
        kv_slots: np.ndarray,
        slot: int,
        table: np.ndarray,
    ) -> None:
        self._host.reverse()
        host, buffers = self._host[0], self._buffers
        host.wait()
        length = len(token_ids)
        numbers = host.array
        numbers[: 2 * MAX_TOKENS] = 0
        numbers[buffers.kv_slots_at] = _NOTHING
        numbers[:length] = token_ids
        numbers[MAX_TOKENS : MAX_TOKENS + length] = positions
        numbers[buffers.kv_slots_at.start :][:length] = kv_slots
        numbers[buffers.meta_at] = slot, positions[0], 0, length, length - 1
        numbers[buffers.table_at.start :][: len(table)] = table
        for tile_size, where in buffers.tiles_at.items():
            tiles = numbers[where].reshape(-1, 2)
            tiles[:, 0], tiles[:, 1] = _NOTHING, 0
            firsts = np.arange(0, length, tile_size)
            tiles[: len(firsts), 0], tiles[: len(firsts), 1] = 0, firsts
        host.copy_to(buffers.numbers)

    def run(self) -> None:
        """Compute the chunk that was loaded. Queues only, and allocates no inputs."""
        model, buffers, ops = self.model, self._buffers, self.model.operations
        factor = model.config.rope.attention_factor
        cos, sin = ops.rotary_cos_sin(buffers.positions, model.frequencies, factor, model.dtype)
        attention, conv, rule = self._plans
        plan = StepPlan(
            products=ops.products,
            num_decodes=0,
            cos=cos,
            sin=sin,
            kv_slots=buffers.kv_slots,
            attention=attention,
            decode=None,
            prefill=DeltaPlan(conv, rule),
        )
        hidden = model.planned_states(buffers.token_ids, plan, self.pool)
        last = hidden.index_select(0, buffers.last_row)
        self.logits.copy_(model.logits(last))
        ops.greedy(self.logits, out=(self.sampled, self.alive))
