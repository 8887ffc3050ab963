"""One step's input to the model: built from a ScheduledBatch, frozen, passed and never looked up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minivllm_engine.core.request import Request
from minivllm_engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledSequence
from minivllm_engine.tensors.cache_pool import CachePool
from minivllm_engine.tensors.device_copy import on_device


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Tokens of a step that lie on the device, where they were sampled.

    Attributes:
        token_ids: [any] int64.
        sources: [num_tokens] integers: where in `token_ids` the token of each row is; negative: the row
            has a token of its own.
    """

    token_ids: torch.Tensor
    sources: torch.Tensor


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A packed batch of `num_seqs` sequences with `num_tokens` new tokens in all.

    The first `num_decodes` sequences have exactly one new token each, so their rows are 0 to
    num_decodes - 1; the others (prefill chunks, of any length) follow, packed one after the other.
    Whether a sequence has a past is decided by its position alone: where `starts[i]` is 0, conv and
    recurrent state are zero whatever its slot holds.

    Attributes:
        token_ids: [num_tokens] integers; of no meaning where `sampled` has the token.
        positions: [num_tokens] integers, the absolute position of each token.
        starts: [num_seqs], tokens of each sequence that earlier steps have computed (host).
        lengths: [num_seqs], new tokens of each sequence (host).
        slots: [num_seqs] integers, the state slot of each sequence.
        block_tables: [num_seqs, max_blocks] integers, padded with the sink block. Token p of a sequence
            lies in its block p // block_size at offset p % block_size.
        kv_slots: [num_tokens] integers, where each new token's K and V go: block * block_size + offset.
        logits_rows: [num_logits] int64, rows of the packed batch whose logits are wanted.
        num_decodes: see above.
        scored_rows: [num_scored] int64, rows whose logits tell the logprob of a prompt's next token;
            None for none. They may be many: take them in parts.
        sampled: tokens that were sampled last, or None where all are in `token_ids`.
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
    sampled: SampledTokens | None = None


@dataclass(frozen=True, slots=True)
class AwaitedTokens:
    """What the step before samples, which the host does not know yet.

    Attributes:
        token_ids: [num_rows] int64, on the device.
        rows: where in it each request's token is.
    """

    token_ids: torch.Tensor
    rows: Mapping[Request, int]

    def sources(self, sequences: Sequence[ScheduledSequence]) -> tuple[list[int], list[int]]:
        """Return which of `sequences` await their token, and their rows of `token_ids`."""
        places = [i for i, sequence in enumerate(sequences) if sequence.awaits]
        return places, [self.rows[sequences[i].request] for i in places]


def build_model_input(
    batch: ScheduledBatch, pool: CachePool, awaited: AwaitedTokens | None = None
) -> ModelInput:
    """Pack a scheduled batch for the model. Copies what it needs: the batch may change afterwards.

    Args:
        awaited: of the step before, where sequences await their tokens.
    """
    sequences = batch.sequences
    tokens: list[int] = []
    positions, kv_slots = [], []
    logits_rows: list[int] = []
    scored_rows: list[int] = []
    size = pool.block_size
    for sequence in sequences:
        start, end = sequence.start, sequence.start + sequence.length
        tokens += [0] if sequence.awaits else sequence.request.token_ids(start, end)
        span = np.arange(start, end)
        positions.append(span)
        kv_slots.append(np.array(sequence.block_table)[span // size] * size + span % size)
        first = len(tokens) - sequence.length
        scored_rows += [first + position - start for position in sequence.scored]
        if sequence.samples:
            logits_rows.append(len(tokens) - 1)
    widest = max(len(sequence.block_table) for sequence in sequences)
    tables = np.full((len(sequences), widest), pool.sink_block)
    for i, sequence in enumerate(sequences):
        tables[i, : len(sequence.block_table)] = sequence.block_table
    slots = np.array([sequence.slot for sequence in sequences])
    parts = [np.array(tokens), np.concatenate(positions), slots, tables.ravel()]
    parts += [np.concatenate(kv_slots), np.array(logits_rows, dtype=np.int64)]
    parts += [np.array(scored_rows, dtype=np.int64)]
    packed = on_device(np.concatenate(parts), torch.int64, pool.device)
    ids, places, slot_ids, table_ids, kv, logits, scored = packed.split_with_sizes(
        [len(part) for part in parts]
    )
    if awaited is not None:
        waiting, sources = awaited.sources(sequences)
        if waiting:
            index = on_device([*waiting, *sources], torch.int64, pool.device).view(2, -1)
            ids.index_copy_(0, index[0], awaited.token_ids.index_select(0, index[1]))
    return ModelInput(
        token_ids=ids,
        positions=places,
        starts=tuple(sequence.start for sequence in sequences),
        lengths=tuple(sequence.length for sequence in sequences),
        slots=slot_ids,
        block_tables=table_ids.view(len(sequences), widest),
        kv_slots=kv,
        logits_rows=logits,
        num_decodes=batch.num_decodes,
        scored_rows=scored if scored_rows else None,
    )
