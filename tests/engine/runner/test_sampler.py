"""Sampling: exact greedy, truncation, penalties, counters, and rows that do not touch each other."""

import dataclasses
import math
from collections import Counter
from itertools import pairwise

import pytest
import torch

from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.ops.sampling import race
from minivllm_engine.runner import logit_edits, sampler
from minivllm_engine.runner.logit_edits import SamplingRow
from minivllm_engine.runner.sampler import sample

VOCAB = 50


def row(position: int = 0, *, index: int = 0, prompt=(), output=(), forbidden=(), **params):
    sampling = SamplingParams.create(**{"temperature": 0, **params}).resolved(seed=0)
    return SamplingRow(sampling, index, position, prompt, output, forbidden)


def draw(logits: torch.Tensor, rows) -> list[int | None]:
    return [one.token_id for one in sample(logits, rows)]


def logits_of(seed: int, num_rows: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_h4_temperature_0_is_argmax_and_mixes_with_sampled_rows() -> None:
    logits = logits_of(0, 8)
    rows = [row(i, temperature=0 if i % 2 else 1.0, seed=3) for i in range(8)]
    mixed = draw(logits, rows)
    for i in range(8):
        assert mixed[i] == draw(logits[i : i + 1], [rows[i]])[0]
        if i % 2:
            assert mixed[i] == int(logits[i].argmax())


@pytest.mark.parametrize("top_k", [-1, 0, 1, 2, VOCAB, VOCAB + 1, 10**9])
def test_h5_any_top_k_works_and_keeps_what_it_says(top_k: int) -> None:
    logits = logits_of(1)
    allowed = set(logits[0].topk(top_k if 0 < top_k < VOCAB else VOCAB).indices.tolist())
    seen = {draw(logits, [row(i, temperature=1.5, top_k=top_k)])[0] for i in range(300)}
    assert seen <= allowed
    assert len(seen) == min(len(allowed), 2) or len(seen) > 2


def test_h7_top_p_0_keeps_the_likeliest_token() -> None:
    logits = logits_of(2)
    best = int(logits.argmax())
    assert {draw(logits, [row(i, temperature=2.0, top_p=0)])[0] for i in range(100)} == {best}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    seen = Counter(draw(probs.log(), [row(i, temperature=1, top_p=0.75)])[0] for i in range(400))
    assert set(seen) == {0, 1}
    assert abs(seen[0] / 400 - 0.625) < 0.1


def test_min_p_drops_what_is_far_less_likely() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    seen = {draw(probs.log(), [row(i, temperature=1, min_p=0.4)])[0] for i in range(300)}
    assert seen == {0, 1}


KINDS = [
    {},
    {"temperature": 0.6},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.4, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"top_p": 0.9, "presence_penalty": 1.0, "logit_bias": {3: 2.0, 8: -1.0}},
]


def distribution(logits: torch.Tensor, known: SamplingRow) -> torch.Tensor:
    """What tokens are drawn with, by the book and in fp64: [vocab]."""
    p, x = known.params, logits.double().clone()
    for i in {*known.prompt_ids, *known.output_ids}:
        x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
    for i, count in Counter(known.output_ids).items():
        x[i] -= p.presence_penalty + p.frequency_penalty * count
    for i, bias in p.logit_bias.items():
        x[i] += bias
    probs, ids = (x / p.temperature).softmax(0).sort(descending=True, stable=True)
    if p.top_k > 0:
        probs[p.top_k :] = 0
    probs /= probs.sum()
    probs[(probs.cumsum(0) - probs) >= p.top_p] = 0
    probs[probs < probs[0] * p.min_p] = 0
    return torch.zeros_like(probs).scatter(0, ids, probs / probs.sum())


@pytest.mark.parametrize("params", KINDS, ids=str)
def test_samples_follow_the_distribution(params: dict) -> None:
    """By chi-square, at a level of one in some ten thousand."""
    count, logits = 20_000, logits_of(11)[0, :24] / 2
    known = {"prompt": (1, 2, 3, 4), "output": (4, 5, 5, 6, 20)}
    rows = [row(i, **{"temperature": 1.0, "seed": 9, **params}, **known) for i in range(count)]
    seen = torch.tensor(draw(logits.expand(count, -1), rows)).bincount(minlength=24)
    wanted = distribution(logits, rows[0]) * count
    assert seen[wanted == 0].sum() == 0
    rare = (wanted < 8) & (wanted > 0)
    cells = [(int(seen[i]), float(wanted[i])) for i in range(24) if wanted[i] >= 8]
    if rare.any():
        cells.append((int(seen[rare].sum()), float(wanted[rare].sum())))
    chi_square = sum((a - b) ** 2 / b for a, b in cells)
    freedom = len(cells) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 8


@pytest.mark.parametrize("temperature", [1e-5, 1e-300, 5e-324])
def test_tiny_temperatures_are_argmax_and_do_not_overflow(temperature: float) -> None:
    logits = logits_of(3)
    assert draw(logits, [row(temperature=temperature)]) == [int(logits.argmax())]


def test_h8_dead_logits_end_their_row_only() -> None:
    logits = logits_of(4, 5)
    rows = [row(i, temperature=i % 2, logprobs=2) for i in range(5)]
    clean = sample(logits, rows)
    dead = logits.clone()
    dead[1, 7] = torch.nan
    dead[3, 2] = torch.inf
    dead[4] = 1.5
    results = sample(dead, rows)
    assert [one.token_id is None for one in results] == [False, True, False, True, True]
    assert results[0] == clean[0]
    assert results[2] == clean[2]


def test_h10_random_keys_are_those_of_seed_index_and_position() -> None:
    keys = {
        int(key)
        for seed in range(10)
        for index in range(10)
        for key in race.row_keys([race.key_base(seed, index)] * 50, range(50))
    }
    assert len(keys) == 5000
    assert race.key_base(-1, 0) == race.key_base(2**64 - 1, 0)
    flat = torch.zeros(1, 400)
    flat[0, 0] = 1e-6
    tokens = draw(flat.expand(4000, -1), [cold(i) for i in range(4000)])
    mean = sum(tokens) / 4000
    lagged = sum((a - mean) * (b - mean) for a, b in pairwise(tokens))
    assert abs(lagged / sum((a - mean) ** 2 for a in tokens)) < 0.06


def cold(position: int) -> SamplingRow:
    return row(position, temperature=1.0, seed=7)


def test_h18_penalties_act() -> None:
    logits = torch.tensor([[2.0, 1.9, 1.0, -1.0]])
    assert draw(logits, [row(repetition_penalty=1.2, prompt=[0])]) == [1]
    assert draw(logits, [row(presence_penalty=0.2, output=[0])]) == [1]
    assert draw(logits, [row(presence_penalty=0.2, prompt=[0])]) == [0]
    assert draw(logits, [row(frequency_penalty=0.06, output=[0])]) == [0]
    assert draw(logits, [row(frequency_penalty=0.06, output=[0, 0])]) == [1]
    # A negative logit is multiplied: dividing it would make the token likelier.
    negative = torch.tensor([[-1.0, -1.1, -9.0]])
    assert draw(negative, [row(repetition_penalty=1.5, output=[0])]) == [1]


def test_logit_bias_and_forbidden_ids() -> None:
    logits = torch.tensor([[2.0, 1.9, 1.0]])
    assert draw(logits, [row(logit_bias={2: 5})]) == [2]
    assert draw(logits, [row(forbidden=[0, 1])]) == [2]


def test_adjusting_one_row_leaves_its_neighbours_and_the_logits_alone() -> None:
    logits = logits_of(5, 3)
    before = logits.clone()
    plain = [row(i) for i in range(3)]
    best = int(logits[1].argmax())
    changed = [plain[0], row(1, logit_bias={best: -100}), plain[2]]
    a, b = draw(logits, plain), draw(logits, changed)
    assert (a[0], a[2]) == (b[0], b[2])
    assert a[1] != b[1]
    assert torch.equal(logits, before)


def test_logprobs_are_those_of_the_model_before_any_change() -> None:
    logits = logits_of(6)
    token = int(logits[0].topk(3).indices[2])
    result = sample(logits, [row(logprobs=3, logit_bias={token: 100}, temperature=0.5)])[0]
    reference = logits[0].double().log_softmax(-1)
    assert result.token_id == token
    assert result.logprobs.sampled.rank == 3
    assert result.logprobs.sampled.logprob == pytest.approx(float(reference[token]))
    top = result.logprobs.top
    assert [t.token_id for t in top] == reference.topk(3).indices.tolist()
    assert [t.rank for t in top] == [1, 2, 3]


def test_a_vocabulary_of_one_token_is_not_dead() -> None:
    assert draw(torch.zeros(1, 1), [row()]) == [0]


@pytest.mark.parametrize("top_k", [1, 2, 40, 64])
def test_few_of_a_large_vocabulary_are_drawn_as_by_a_sort(top_k: int) -> None:
    """Logits in bf16 with many ties, zeros of both signs and -inf, from the most likely token down."""
    logits = (torch.randn(40, 3000, generator=torch.Generator().manual_seed(4)) * 2).bfloat16()
    logits[:20] = logits[:20].clamp(max=2.0)
    logits[10:15] -= logits[10:15].amax(-1, keepdim=True)
    logits[12:15, ::2] = -logits[12:15, ::2].abs()
    logits[15:, 100:2990] = -torch.inf
    logits[15:, 7] = 3.0
    finite = logits.float().clamp(min=-1e30)
    rows = [row(i, temperature=0.7, top_k=top_k, top_p=0.95, min_p=0.01) for i in range(40)]
    few = draw(finite, rows)
    for each in (slice(0, 1), slice(13, 17)):
        assert draw(finite[each], rows[each]) == few[each]
    beyond = finite.sort(dim=-1, descending=True, stable=True).indices[:, top_k:]
    cut_off = finite.scatter(1, beyond, -1e38)
    everything = [row(i, temperature=0.7, top_k=0, top_p=0.95, min_p=0.01) for i in range(40)]
    assert draw(cut_off, everything) == few


def test_the_first_of_equals_comes_first_among_the_largest() -> None:
    """-0 and 0 are equal, and the largest of negative numbers is the one nearest to them."""
    values = torch.tensor([[-1.0, 0.0, -0.0, 2.0, -3.0, 2.0, 0.0]]).repeat(1, 20)
    ordered, ids = race.largest(values, 64)
    wanted, wanted_ids = values.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids, wanted_ids[:, :64]) and torch.equal(ordered, wanted[:, :64])


def test_h8_dead_rows_are_drawn_without_harm_to_those_beside_them() -> None:
    """Nothing waits to see which rows are non-finite before it draws."""
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(5))
    logits[1], logits[2], logits[3] = math.nan, math.inf, -math.inf
    logits[4] = 1.0
    for top_k in (0, 20):
        rows = [row(i, temperature=1.0, top_k=top_k) for i in range(6)]
        drawn = sampler.draw(logits, rows)
        assert drawn.alive.tolist() == [True, False, False, False, False, True]
        assert drawn.token_ids.min() >= 0 and drawn.token_ids.max() < 200
        ids = draw(logits, rows)
        assert ids[1:5] == [None] * 4
        assert [ids[0], ids[5]] == draw(logits[[0, 5]], [rows[0], rows[5]])


def test_counts_on_the_device_are_those_of_the_tokens() -> None:
    """Tokens go in where they are drawn: with lists that are kept the answer is that of lists made anew."""
    params = [
        {"presence_penalty": 1.5, "frequency_penalty": 0.7, "temperature": 1.0},
        {"repetition_penalty": 1.8},
        {"logit_bias": {3: 4.0}, "temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0},
    ]
    edits = logit_edits.LogitEdits(4, VOCAB, torch.device("cpu"))
    outputs: list[list[int]] = [[] for _ in params]
    owners = [object() for _ in params]
    for step in range(70):
        logits = logits_of(step, 4)
        fresh, kept = [], []
        for i, each in enumerate(params):
            forbidden = (1, 2) if step < 5 and i else ()
            new = row(
                5 + step,
                prompt=(1, 2, 2, 30),
                output=tuple(outputs[i]),
                forbidden=forbidden,
                **each,
            )
            fresh.append(new)
            # Of these the host has not learnt a token, but where one is lost and everything begins anew.
            late = new if step in (0, 40) else row(5 + step, forbidden=forbidden, **each)
            owner = owners[i] if step < 40 else params[i]
            kept.append(dataclasses.replace(late, slot=3 - i, owner=owner))
        found = sampler.draw(logits, kept, edits=edits).token_ids.tolist()
        assert found == draw(logits, fresh)
        for output, token in zip(outputs, found, strict=True):
            output.append(token)
    assert all(len(set(output)) > 5 for output in outputs)


def test_a_list_that_is_not_of_this_position_is_not_used() -> None:
    """A step that was given up has entered a token that is drawn again."""
    edits = logit_edits.LogitEdits(1, VOCAB, torch.device("cpu"))
    logits, owner = logits_of(3), object()

    def at(position: int, output: tuple[int, ...]) -> int:
        known = row(position, prompt=(1,), output=output, frequency_penalty=2.0)
        known.owner = owner
        return int(sampler.draw(logits, [known], edits=edits).token_ids)

    first = at(1, ())
    second = at(2, (first,))
    assert at(2, (first,)) == second
    assert at(1, ()) == first
