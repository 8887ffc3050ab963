"""Drives the model by hand, without a scheduler: any tokens of any sequences in one step.

Slots and blocks are handed out in random order from a pool that is full of NaN, so that whatever is
read before it was written, or read from another sequence, shows.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from minivllm_engine.checkpoint.index import CheckpointIndex
from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.models.miniqwen import MiniQwenForCausalLM
from minivllm_engine.ops.operations import Operations
from minivllm_engine.ops.reference_backend import REFERENCE
from minivllm_engine.runner.weights import load_weights
from minivllm_engine.tensors.cache_pool import CachePool
from minivllm_engine.tensors.model_input import ModelInput

CPU = torch.device("cpu")


def load_model(
    path,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    operations: Operations = REFERENCE,
) -> MiniQwenForCausalLM:
    config = ModelConfig.from_dir(path)
    model = MiniQwenForCausalLM(config, operations, dtype=dtype, device=device)
    load_weights(model, CheckpointIndex.open(path))
    return model


@dataclass
class Row:
    """One sequence: its tokens, where its state and its KV lie, and how far it has come."""

    token_ids: list[int]
    slot: int
    blocks: list[int]
    done: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def all_logits(self) -> torch.Tensor:
        return torch.cat(self.logits)


class PackedRunner:
    def __init__(
        self,
        model: MiniQwenForCausalLM,
        *,
        num_slots: int = 12,
        num_blocks: int = 120,
        block_size: int = 16,
        state_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.pool = CachePool(
            model.config,
            num_slots=num_slots,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=model.dtype,
            state_dtype=state_dtype,
            device=model.device,
        )
        self.pool.fill_(float("nan"))
        self._slots, self._blocks = list(range(num_slots)), list(range(num_blocks))
        rng = random.Random(seed)
        rng.shuffle(self._slots)
        rng.shuffle(self._blocks)

    def add(self, token_ids: Sequence[int]) -> Row:
        count = -(-len(token_ids) // self.pool.block_size)
        blocks = [self._blocks.pop() for _ in range(count)]
        return Row(list(token_ids), self._slots.pop(), blocks)

    def release(self, row: Row) -> None:
        """Free a sequence's slot and blocks, to be the next that are handed out, as they are."""
        self._slots.append(row.slot)
        self._blocks += row.blocks

    @torch.inference_mode()
    def step(self, *parts: tuple[Row, int], decode_singles: bool = True) -> None:
        """Compute that many next tokens of each row, and keep their logits.

        decode_singles: rows with one token go first, as decodes; else as prefill chunks.
        """
        decodes = [part for part in parts if part[1] == 1 and decode_singles]
        parts = (*decodes, *(part for part in parts if part not in decodes))
        batch = self._input(parts, len(decodes))
        logits = self.model(batch, self.pool)
        assert logits.shape[0] == batch.token_ids.shape[0]
        first = 0
        for row, count in parts:
            row.logits.append(logits[first : first + count])
            row.done += count
            first += count

    def _input(self, parts: Sequence[tuple[Row, int]], num_decodes: int) -> ModelInput:
        size = self.pool.block_size
        widest = max(len(row.blocks) for row, _ in parts)
        tokens: list[int] = []
        positions: list[int] = []
        kv_slots: list[int] = []
        for row, count in parts:
            span = range(row.done, row.done + count)
            tokens += [row.token_ids[p] for p in span]
            positions += span
            kv_slots += [row.blocks[p // size] * size + p % size for p in span]
        pad = [self.pool.sink_block] * widest

        def tensor(values) -> torch.Tensor:
            return torch.tensor(values, device=self.pool.device)

        return ModelInput(
            token_ids=tensor(tokens),
            positions=tensor(positions),
            starts=tuple(row.done for row, _ in parts),
            lengths=tuple(count for _, count in parts),
            slots=tensor([row.slot for row, _ in parts]),
            block_tables=tensor([[*r.blocks, *pad[len(r.blocks) :]] for r, _ in parts]),
            kv_slots=tensor(kv_slots),
            logits_rows=tensor(range(len(tokens))),
            num_decodes=num_decodes,
        )

    def run(self, token_ids: Sequence[int], *chunks: int) -> Row:
        """One sequence from start to end, in chunks of these lengths, the last one repeated."""
        row = self.add(token_ids)
        lengths = list(chunks) or [len(token_ids)]
        while row.done < len(token_ids):
            count = lengths.pop(0) if len(lengths) > 1 else lengths[0]
            self.step((row, min(count, len(token_ids) - row.done)))
        return row
