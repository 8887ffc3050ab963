"""A decode step over buffers that stay where they are: what a CUDA graph can be captured from.

A step of any number of sequences is padded to a batch size of a few. Its padding lanes have the slot -1,
which the operations take for "nobody's": they read and write nothing that is anybody's. The tokens that
were sampled last stay on the device, where the next step finds them.
"""

import numpy as np
import torch

from minivllm_engine.models.miniqwen import MiniQwenForCausalLM
from minivllm_engine.scheduling.scheduled_batch import ScheduledSequence
from minivllm_engine.tensors.cache_pool import CachePool
from minivllm_engine.tensors.model_input import AwaitedTokens, ModelInput, SampledTokens

# The numbers of a lane: token, source, position, slot and KV slot.
_NOBODY = (0, -1, 0, -1, -1)


class GraphDecode:
    """The buffers of decode steps of up to `max_batch` sequences, and the step itself.

    Attributes:
        logits: [max_batch, vocab_size], of the last step.
        sampled: [max_batch] int64, its tokens: the most likely ones, until somebody puts others there.
        alive: [max_batch] bool, see ops/sampling.
    """

    def __init__(
        self,
        model: MiniQwenForCausalLM,
        pool: CachePool,
        *,
        max_batch: int,
        max_model_len: int,
    ) -> None:
        assert model.operations.graph_decode
        self.model, self.pool, self.max_batch = model, pool, max_batch
        self._max_model_len = max_model_len
        max_blocks = -(-max_model_len // pool.block_size)
        device = model.device

        def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._numbers = buffer(5, max_batch, dtype=torch.int32)
        self._tables = buffer(max_batch, max_blocks, dtype=torch.int32)
        self.logits = buffer(max_batch, model.config.vocab_size, dtype=model.dtype)
        self.sampled = buffer(max_batch, dtype=torch.int64)
        self.alive = buffer(max_batch, dtype=torch.bool)
        # The copy of a step may still be on its way when the next one is prepared.
        self._host = [
            _HostBuffers(max_batch, max_blocks, pool.sink_block, pinned=device.type == "cuda")
            for _ in range(2)
        ]

    def load(
        self,
        sequences: tuple[ScheduledSequence, ...],
        awaited: AwaitedTokens | None,
        size: int,
    ) -> None:
        """Queue the copy of a step's numbers, padded to `size` sequences."""
        self._host.reverse()
        host = self._host[0]
        sources: dict[int, int] = {}
        if awaited is not None:
            sources = dict(zip(*awaited.sources(sequences), strict=True))
            count = awaited.token_ids.shape[0]
            if sources and awaited.token_ids.data_ptr() != self.sampled.data_ptr():
                self.sampled[:count].copy_(awaited.token_ids)
        host.fill(sequences, sources, size, self.pool.block_size)
        host.numbers.copy_to(self._numbers)
        host.tables.copy_to(self._tables[:size])

    def load_padding(self, size: int) -> None:
        """Queue the copy of a step without a sequence."""
        host = self._host[0]
        host.fill((), {}, size, self.pool.block_size)
        host.numbers.copy_to(self._numbers)
        host.tables.copy_to(self._tables[:size])

    def run(self, size: int) -> None:
        """Compute the step that was loaded, for `size` sequences. Queues only, and allocates no inputs."""
        token_ids, sources, positions, slots, kv_slots = self._numbers[:, :size].unbind(0)
        batch = ModelInput(
            token_ids=token_ids,
            positions=positions,
            # Unknown here: as long as can be.
            starts=(self._max_model_len - 1,) * size,
            lengths=(1,) * size,
            slots=slots,
            block_tables=self._tables[:size],
            kv_slots=kv_slots,
            logits_rows=slots,
            num_decodes=size,
            sampled=SampledTokens(self.sampled, sources),
        )
        ops = self.model.operations
        logits = self.model.all_logits(batch, self.pool, out=self.logits[:size])
        ops.greedy(logits, out=(self.sampled[:size], self.alive[:size]))


class HostNumbers:
    """Numbers of int32 on the host that are copied to the device again and again."""

    def __init__(self, shape: tuple[int, ...], *, pinned: bool) -> None:
        self._tensor = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)
        self.array: np.ndarray = self._tensor.numpy()
        self._copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait until the last copy is done: before it they must not change.

        Of a step that was given up nobody else waits for it.
        """
        if self._copied is not None:
            self._copied.synchronize()

    def copy_to(self, target: torch.Tensor) -> None:
        """Queue the copy of as many rows as `target` has."""
        target.copy_(self._tensor[: target.shape[0]], non_blocking=True)
        if target.device.type == "cuda":
            self._copied = torch.cuda.current_stream().record_event()


class _HostBuffers:
    """The numbers of one step on the host."""

    def __init__(self, max_batch: int, max_blocks: int, sink_block: int, *, pinned: bool) -> None:
        self.numbers = HostNumbers((5, max_batch), pinned=pinned)
        self.tables = HostNumbers((max_batch, max_blocks), pinned=pinned)
        self.tables.array[:] = sink_block
        self._sink_block = sink_block
        self._written: list[tuple[int, ...]] = [()] * max_batch

    def fill(
        self,
        sequences: tuple[ScheduledSequence, ...],
        sources: dict[int, int],
        size: int,
        block_size: int,
    ) -> None:
        """Write a step. `sources`: rows of the last tokens that sequences, by their place, await."""
        self.numbers.wait()
        self.tables.wait()
        columns = []
        for lane, sequence in enumerate(sequences):
            position = sequence.start
            source = sources.get(lane, -1)
            token = 0 if source >= 0 else sequence.request.token_at(position)
            block = sequence.block_table[position // block_size]
            kv_slot = block * block_size + position % block_size
            columns.append((token, source, position, sequence.slot, kv_slot))
            self._write_table(lane, sequence.block_table)
        for lane in range(len(sequences), size):
            self._write_table(lane, ())
        columns += [_NOBODY] * (size - len(sequences))
        self.numbers.array[:, :size] = np.array(columns, dtype=np.int32).T

    def _write_table(self, lane: int, table: tuple[int, ...]) -> None:
        # Most tables are those of the step before last.
        if self._written[lane] == table:
            return
        row = self.tables.array[lane]
        row[: len(table)] = table
        row[len(table) : len(self._written[lane])] = self._sink_block
        self._written[lane] = table
