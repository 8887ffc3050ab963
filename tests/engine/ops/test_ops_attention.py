"""Paged attention against plain softmax attention, over a cache full of NaN."""

import random

import pytest
import torch

from minivllm_engine.ops.attention import reference
from minivllm_engine.ops.attention.reference import KVShape, ReferenceAttentionPlan, paged_attention
from minivllm_engine.tensors.model_input import ModelInput
from support.largest_tensor import LargestTensor

BLOCK = 16


class PagedCase:
    """Sequences of random content, (start, length) each, in a pool in which all else is NaN."""

    def __init__(self, spans, *, heads=4, kv_heads=2, head_dim=8, num_decodes=0, seed=0):
        torch.manual_seed(seed)
        rng = random.Random(seed)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        totals = [start + length for start, length in spans]
        counts = [-(-total // BLOCK) for total in totals]
        free = list(range(sum(counts) + 3))
        rng.shuffle(free)
        tables = [[free.pop() for _ in range(count)] for count in counts]
        shape = (sum(counts) + 3, BLOCK, kv_heads, head_dim)
        self.keys, self.values = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
        self.content = [torch.randn(2, total, kv_heads, head_dim) for total in totals]
        for table, (k, v) in zip(tables, self.content, strict=True):
            for position in range(k.shape[0]):
                where = table[position // BLOCK], position % BLOCK
                self.keys[where], self.values[where] = k[position], v[position]
        self.spans = spans
        self.q = torch.randn(sum(length for _, length in spans), heads, head_dim)
        widest = max(counts)
        self.batch = ModelInput(
            token_ids=torch.zeros(0),
            positions=torch.zeros(0),
            starts=tuple(start for start, _ in spans),
            lengths=tuple(length for _, length in spans),
            slots=torch.arange(len(spans)),
            block_tables=torch.tensor([[*t, *[0] * (widest - len(t))] for t in tables]),
            kv_slots=torch.zeros(0),
            logits_rows=torch.zeros(0),
            num_decodes=num_decodes,
        )

    def plan(self) -> ReferenceAttentionPlan:
        shape = KVShape(BLOCK, self.heads, self.kv_heads, self.head_dim)
        return ReferenceAttentionPlan.build(self.batch, shape)

    def run(self) -> torch.Tensor:
        return paged_attention(self.q, self.keys, self.values, self.plan())

    def expected(self) -> torch.Tensor:
        group = self.heads // self.kv_heads
        parts = []
        queries = self.q.split([length for _, length in self.spans])
        for (start, length), (k, v), q in zip(self.spans, self.content, queries, strict=True):
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q, k) * self.head_dim**-0.5
            future = torch.ones(length, start + length, dtype=torch.bool).triu(start + 1)
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(parts)


CASES = {
    "first_token": [(0, 1)],
    "decodes": [(0, 1), (15, 1), (16, 1), (200, 1), (3, 1)],
    "prompts": [(0, 5), (0, 17), (0, 64), (0, 65)],
    "chunks": [(30, 34), (1, 70), (100, 3), (7, 200)],
    "mixed": [(40, 1), (9, 1), (0, 30), (64, 64), (300, 2)],
}
HEADS = {"gqa": (4, 2), "mha": (3, 3), "mqa": (6, 1)}


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("spans", CASES.values(), ids=CASES)
def test_equals_plain_attention(spans, heads) -> None:
    case = PagedCase(spans, heads=heads[0], kv_heads=heads[1])
    torch.testing.assert_close(case.run(), case.expected(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("spans", CASES.values(), ids=CASES)
def test_equals_plain_attention_over_many_ranges_of_keys(
    spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The running softmax: ranges of 7 keys, so that most queries see nothing of most ranges."""
    monkeypatch.setattr(reference, "_MIN_KEYS", 7)
    monkeypatch.setattr(reference, "_MAX_NUMBERS", 1)
    case = PagedCase(spans)
    torch.testing.assert_close(case.run(), case.expected(), rtol=0, atol=2e-6)


def test_large_scores_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_MIN_KEYS", 7)
    monkeypatch.setattr(reference, "_MAX_NUMBERS", 1)
    case = PagedCase(CASES["mixed"])
    case.q *= 300
    assert case.run().isfinite().all()
    torch.testing.assert_close(case.run(), case.expected(), rtol=0, atol=2e-4)


def test_nan_of_one_sequence_does_not_reach_the_others() -> None:
    case = PagedCase([(20, 1), (70, 1), (0, 9), (0, 12)])
    clean = case.run()
    table = case.batch.block_tables
    case.keys[table[1, 2]] = case.values[table[1, 2]] = float("nan")
    case.keys[table[3, 0]] = case.values[table[3, 0]] = float("nan")
    dirty = case.run()
    others = [0, *range(2, 11)]
    assert torch.equal(dirty[others], clean[others])
    assert dirty[1].isnan().all() and dirty[11:].isnan().all()


def test_e9_scratch_does_not_grow_with_the_context() -> None:
    """A chunk of 64 tokens at position 100,000, and 8 decodes with as long a past."""
    for spans in ([(100_000, 64)], [(100_000, 1), (20_000, 1), *[(500, 1)] * 6]):
        case = PagedCase(spans, heads=4, kv_heads=1, head_dim=8)
        with LargestTensor() as watch:
            out = paged_attention(case.q, case.keys, case.values, case.plan())
        assert watch.numel <= reference._MAX_NUMBERS
        torch.testing.assert_close(out, case.expected(), rtol=0, atol=2e-6)
