"""One step's input to the model: built from a ScheduledBatch, frozen, passed and never looked up."""

from dataclasses import dataclass

import torch

from minivllm_engine.cache_pool import CachePool
from minivllm_engine.scheduler import ScheduledBatch


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A packed batch of `num_seqs` sequences with `num_tokens` new tokens in all.

    The first `num_decodes` sequences have exactly one new token each, so their rows are 0 to
    num_decodes - 1; the others (prefill chunks, of any length) follow, packed one after the other.
    Whether a sequence has a past is decided by its position alone: where `starts[i]` is 0, conv and
    recurrent state are zero whatever its slot holds.

    Attributes:
        token_ids: [num_tokens] int64.
        positions: [num_tokens] int64, the absolute position of each token.
        starts: [num_seqs], tokens of each sequence that earlier steps have computed (host).
        lengths: [num_seqs], new tokens of each sequence (host).
        slots: [num_seqs] int64, the state slot of each sequence.
        block_tables: [num_seqs, max_blocks] int64, padded with the sink block. Token p of a sequence
            lies in its block p // block_size at offset p % block_size.
        kv_slots: [num_tokens] int64, where each new token's K and V go: block * block_size + offset.
        logits_rows: [num_logits] int64, rows of the packed batch whose logits are wanted.
        num_decodes: see above.
        scored_rows: [num_scored] int64, rows whose logits tell the logprob of a prompt's next token;
            None for none. They may be many: take them in parts.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    slots: torch.Tensor
    block_tables: torch.Tensor
    kv_slots: torch.Tensor
    logits_rows: torch.Tensor
    num_decodes: int
    scored_rows: torch.Tensor | None = None


def build_model_input(batch: ScheduledBatch, pool: CachePool) -> ModelInput:
    """Pack a scheduled batch for the model. Copies what it needs: the batch may change afterwards."""
    sequences = batch.sequences
    tokens: list[int] = []
    positions: list[int] = []
    kv_slots: list[int] = []
    logits_rows: list[int] = []
    scored_rows: list[int] = []
    size = pool.block_size
    for sequence in sequences:
        start, end = sequence.start, sequence.start + sequence.length
        tokens += sequence.request.token_ids(start, end)
        positions += range(start, end)
        table = sequence.block_table
        kv_slots += [table[p // size] * size + p % size for p in range(start, end)]
        first = len(tokens) - sequence.length
        scored_rows += [first + position - start for position in sequence.scored]
        if sequence.samples:
            logits_rows.append(len(tokens) - 1)
    widest = max(len(sequence.block_table) for sequence in sequences)
    padding = [pool.sink_block] * widest
    tables = [[*s.block_table, *padding[len(s.block_table) :]] for s in sequences]

    def tensor(values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=pool.device)

    return ModelInput(
        token_ids=tensor(tokens),
        positions=tensor(positions),
        starts=tuple(sequence.start for sequence in sequences),
        lengths=tuple(sequence.length for sequence in sequences),
        slots=tensor([sequence.slot for sequence in sequences]),
        block_tables=tensor(tables),
        kv_slots=tensor(kv_slots),
        logits_rows=tensor(logits_rows),
        num_decodes=batch.num_decodes,
        scored_rows=tensor(scored_rows) if scored_rows else None,
    )
