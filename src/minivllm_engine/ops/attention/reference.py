"""Grouped-query attention over a paged KV cache in plain PyTorch, with a running softmax in fp32.

Letters: H query heads, G key/value heads, R = H / G, d the head's size; query head h reads key/value
head h // R. Keys are gathered a bounded number at a time, so that scratch memory does not grow with the
context, and only rows that have been written are ever read: nothing that other requests left in
memory can leak in, not even as NaN * 0.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from minivllm_engine.tensors.device_copy import cast, fp32
from minivllm_engine.tensors.model_input import ModelInput

_GRAIN = 8
_BATCHED = 64  # chunks up to this length are padded and computed together, longer ones alone
# Of keys, of values and of scores at a time: as many as stay in a core's cache.
_MAX_NUMBERS = 1 << 18
_MIN_KEYS = 64


@dataclass(frozen=True, slots=True)
class _KeyRange:
    """Some positions of the `num_seqs` sequences of a group that reach so far.

    Attributes:
        skipped: queries of each sequence, from the first on, that see none of these positions.
        positions: [num_keys].
        rows: [num_seqs, G, num_keys], rows of a pool seen as [num_rows, d]. Past a sequence's end its
            last row is repeated.
    """

    num_seqs: int
    skipped: int
    positions: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with about as many queries each, from the longest context to the shortest.

    Attributes:
        queries: [num_seqs, num_queries], rows of the batch. Past a sequence's end its last is repeated.
        positions: [num_seqs, num_queries], of the queries.
        tokens, places: the rows that are there once, and where they stand in `queries`, flattened.
    """

    queries: torch.Tensor
    positions: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor
    key_ranges: tuple[_KeyRange, ...]


@dataclass(frozen=True, slots=True)
class KVShape:
    """How a cache is laid out, and what reads it: block size in tokens, H, G and d."""

    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def width(self, num_queries: int) -> int:
        """Count the numbers that one key of a sequence takes, gathered or as scores of so many queries."""
        return max(num_queries * self.num_heads, self.num_kv_heads * self.head_dim)


@dataclass(frozen=True, slots=True)
class ReferenceAttentionPlan:
    """Which rows of the KV cache each token of a step sees; the same for all attention layers."""

    groups: tuple[_Group, ...]

    @classmethod
    def build(cls, batch: ModelInput, shape: KVShape) -> "ReferenceAttentionPlan":
        contexts = [
            start + length for start, length in zip(batch.starts, batch.lengths, strict=True)
        ]
        alike: defaultdict[int, list[int]] = defaultdict(list)  # padded length -> sequences
        parts = []
        for i, length in enumerate(batch.lengths):
            if length > _BATCHED:
                parts.append((length, [i]))
            else:
                alike[length if length == 1 else -(-length // _GRAIN) * _GRAIN].append(i)
        for size, seqs in alike.items():
            seqs.sort(key=lambda i: -contexts[i])
            while seqs:
                count = max(1, _MAX_NUMBERS // (shape.width(size) * contexts[seqs[0]]))
                parts.append((size, seqs[:count]))
                seqs = seqs[count:]
        return cls(tuple(_group(batch, seqs, size, shape) for size, seqs in parts))


def _group(batch: ModelInput, seqs: list[int], num_queries: int, shape: KVShape) -> _Group:
    device = batch.slots.device
    first_rows = [0, *itertools.accumulate(batch.lengths)]

    def column(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor([values[i] for i in seqs], device=device).unsqueeze(1)

    starts, lengths = column(batch.starts), column(batch.lengths)
    steps = torch.arange(num_queries, device=device)
    own = torch.minimum(steps, lengths - 1)  # [num_seqs, num_queries]
    queries = column(first_rows) + own
    places = (steps < lengths).flatten().nonzero().squeeze(1)

    contexts = [batch.starts[i] + batch.lengths[i] for i in seqs]
    tables = batch.block_tables[torch.tensor(seqs, device=device)]
    heads = torch.arange(shape.num_kv_heads, device=device).unsqueeze(1)
    size = shape.block_size
    key_ranges = []
    for first, last, count in _cut(contexts, shape.width(num_queries)):
        skipped = max(0, first - max(batch.starts[i] for i in seqs[:count]))
        positions = torch.arange(first, last, device=device)
        inside = torch.minimum(positions, (starts + lengths)[:count] - 1)
        which = torch.minimum(positions // size, (starts + lengths - 1)[:count] // size)
        slots = (tables[:count].gather(1, which) - which) * size + inside
        rows = slots.unsqueeze(1) * shape.num_kv_heads + heads
        key_ranges.append(_KeyRange(count, skipped, positions, rows))
    return _Group(queries, starts + own, queries.flatten()[places], places, tuple(key_ranges))


def _cut(contexts: list[int], width: int) -> Iterator[tuple[int, int, int]]:
    """Ranges (first position, last, sequences that reach it) of contexts in falling order.

    A key of a sequence takes `width` numbers; a range takes at most _MAX_NUMBERS, if it can.
    """
    first, count = 0, len(contexts)
    while count:
        last = min(contexts[0], first + max(_MIN_KEYS, _MAX_NUMBERS // (width * count)))
        yield first, last, count
        first = last
        while count and contexts[count - 1] <= first:
            count -= 1


def paged_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: ReferenceAttentionPlan
) -> torch.Tensor:
    """Attend causally for all tokens of a step, whose own keys and values are in the cache already.

    Args:
        q: [num_tokens, H, d].
        keys, values: [num_blocks, block_size, G, d].
        plan: made for this step.

    Returns:
        [num_tokens, H, d] in q's dtype.
    """
    num_kv_heads, head_dim = keys.shape[2:]
    key_rows, value_rows = keys.view(-1, head_dim), values.view(-1, head_dim)
    out = q.new_empty(q.shape)
    for group in plan.groups:
        num_seqs, num_queries = group.queries.shape
        some = fp32(q.index_select(0, group.queries.flatten())) * head_dim**-0.5
        by_head = some.view(num_seqs, num_queries, num_kv_heads, -1, head_dim).permute(
            0, 2, 3, 1, 4
        )
        attended = _attend(by_head, key_rows, value_rows, group)
        attended = attended.permute(0, 3, 1, 2, 4).reshape(num_seqs * num_queries, -1, head_dim)
        out.index_copy_(0, group.tokens, cast(attended.index_select(0, group.places), q.dtype))
    return out


def _attend(
    q: torch.Tensor,
    key_rows: torch.Tensor,
    value_rows: torch.Tensor,
    group: _Group,
) -> torch.Tensor:
    """softmax(q k^T) v over several ranges of keys (arXiv 1805.02867); q is [N, G, R, T, d]."""
    if len(group.key_ranges) == 1:
        scores = _scores(q, key_rows, group, group.key_ranges[0])
        weights = scores.softmax(-1).flatten(2, 3)
        return (weights @ _gather(value_rows, group.key_ranges[0].rows)).view_as(q)
    # Finite, so that a range in which a query sees nothing changes nothing.
    maximum = q.new_full((*q.shape[:-1], 1), torch.finfo(torch.float32).min)
    total, weighted = torch.zeros_like(maximum), torch.zeros_like(q)
    for keys in group.key_ranges:
        seen = (slice(keys.num_seqs), ..., slice(keys.skipped, None), slice(None))
        some = q[seen]
        scores = _scores(some, key_rows, group, keys)
        higher = torch.maximum(maximum[seen], scores.amax(-1, keepdim=True))
        weights = scores.sub_(higher).exp_()
        rescale = (maximum[seen] - higher).exp_()
        maximum[seen] = higher
        total[seen].mul_(rescale).add_(weights.sum(-1, keepdim=True))
        values = weights.flatten(2, 3) @ _gather(value_rows, keys.rows)
        weighted[seen].mul_(rescale).add_(values.view_as(some))
    return weighted / total


def _scores(
    q: torch.Tensor, key_rows: torch.Tensor, group: _Group, keys: _KeyRange
) -> torch.Tensor:
    """q k^T [N, G, R, T, num_keys], -inf where a query does not see."""
    scores = (q.flatten(2, 3) @ _gather(key_rows, keys.rows).mT).view(*q.shape[:-1], -1)
    seen_until = group.positions[: keys.num_seqs, None, None, keys.skipped :, None]
    return scores.masked_fill_(keys.positions > seen_until, -torch.inf)


def _gather(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """rows[index] in fp32, for index [N, G, T]: [N, G, T, d]."""
    return fp32(rows.index_select(0, index.flatten()).view(*index.shape, -1))
