"""The delta rule's chunked form and one-step form against its definition, output and final state."""

import pytest
import torch

from minivllm_engine.ops.gated_delta.plan import ReferenceChunkPlan, SlotPlan
from minivllm_engine.ops.gated_delta.reference import chunk_gated_delta_rule, gated_delta_step
from support.delta_rule import recurrent_delta_rule
from support.largest_tensor import LargestTensor

NAN = float("nan")
# (H, HV, K, V): key/value heads alike, twice and three times as many value heads, K != V both ways.
SHAPES = {
    "ratio_1": (2, 2, 16, 16),
    "ratio_2": (2, 4, 16, 32),
    "ratio_3": (2, 6, 24, 8),
    "one_head": (1, 3, 8, 4),
}


def random_inputs(
    length: int, shape: tuple[int, int, int, int], seed: int = 0, dtype=torch.float32
):
    """q, k, v, g, beta; the decay is between none and strong, and never the same twice."""
    heads, value_heads, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    g = -(torch.rand(length, value_heads, generator=generator, dtype=torch.float64).to(dtype) ** 3)
    beta = torch.rand(length, value_heads, generator=generator, dtype=torch.float64).to(dtype)
    return (
        randn(length, heads, key_dim),
        randn(length, heads, key_dim),
        randn(length, value_heads, value_dim),
        g,
        beta,
    )


def state_pool(num_slots: int, shape: tuple[int, int, int, int]) -> torch.Tensor:
    _, value_heads, key_dim, value_dim = shape
    return torch.full((num_slots, value_heads, value_dim, key_dim), NAN)


def definition(inputs, state, keep=frozenset()):
    return recurrent_delta_rule(*(x.double() for x in inputs), state.double(), keep)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130, 1024, 1030])
def test_chunked_equals_the_definition(length: int, shape) -> None:
    inputs = random_inputs(length, shape)
    pool = state_pool(3, shape)
    pool[1] = torch.randn(pool.shape[1:])
    expected, final, _ = definition(inputs, pool[1])
    q, k, v, g, beta = inputs
    plan = ReferenceChunkPlan.build(torch.tensor([1]), (1,), (length,))
    out = chunk_gated_delta_rule(q, k, v, g=g, beta=beta, pool=pool, plan=plan)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(pool[1].double(), final, rtol=0, atol=2e-6)
    assert pool[[0, 2]].isnan().all()


def test_a_sequence_that_begins_has_state_zero_whatever_its_slot_holds() -> None:
    """Beginning and continuing sequences of all sizes in one batch, over slots full of NaN."""
    shape = SHAPES["ratio_2"]
    lengths, starts = (3, 20, 64, 65, 1100, 20), (0, 0, 7, 0, 0, 1)
    inputs = random_inputs(sum(lengths), shape)
    pool = state_pool(6, shape)
    initial = torch.zeros_like(pool)
    for i, start in enumerate(starts):
        if start:
            pool[i] = initial[i] = torch.randn(pool.shape[1:])
    q, k, v, g, beta = inputs
    plan = ReferenceChunkPlan.build(torch.arange(6), starts, lengths)
    out = chunk_gated_delta_rule(q, k, v, g=g, beta=beta, pool=pool, plan=plan)
    parts = zip(*(x.split(lengths) for x in inputs), strict=True)
    for i, (o, part) in enumerate(zip(out.split(lengths), parts, strict=True)):
        expected, final, _ = definition(part, initial[i])
        torch.testing.assert_close(o.double(), expected, rtol=0, atol=2e-6)
        torch.testing.assert_close(pool[i].double(), final, rtol=0, atol=2e-6)


def test_decay_comes_before_the_prediction() -> None:
    """With g = 0 every order of the two is the same; this one has g != 0, and knows the answer."""
    pool = torch.ones(1, 1, 1, 1)
    one = torch.ones(1, 1, 1)
    g, beta = torch.full((1, 1), -1.0), torch.full((1, 1), 0.5)
    plan = SlotPlan.build(torch.tensor([0]), (1,))
    out = gated_delta_step(one, one, 3 * one, g=g, beta=beta, pool=pool, plan=plan)
    decayed = torch.tensor(-1.0).exp()
    expected = decayed + 0.5 * (3 - decayed)
    torch.testing.assert_close(pool.squeeze(), expected, rtol=0, atol=3e-6)
    torch.testing.assert_close(out.squeeze(), expected, rtol=0, atol=3e-6)


def test_e2_final_state_is_right_for_every_length_to_200() -> None:
    """All lengths are sequences of one packed batch, so this is a test of the packing as well."""
    shape = SHAPES["one_head"]
    inputs = random_inputs(200, shape)
    lengths = tuple(range(1, 201))
    state = torch.randn(state_pool(1, shape).shape[1:])
    expected, _, states = definition(inputs, state, frozenset(lengths))
    pool = state_pool(202, shape)
    slots = torch.randperm(202)[:200]
    pool[slots] = state
    q, k, v, g, beta = (torch.cat([x[:n] for n in lengths]) for x in inputs)
    plan = ReferenceChunkPlan.build(slots, (1,) * 200, lengths)
    out = chunk_gated_delta_rule(q, k, v, g=g, beta=beta, pool=pool, plan=plan)
    for n, slot, o in zip(lengths, slots, out.split(lengths), strict=True):
        torch.testing.assert_close(pool[slot].double(), states[n], rtol=0, atol=2e-6)
        torch.testing.assert_close(o.double(), expected[:n], rtol=0, atol=2e-6)


def test_e2_final_state_near_65535_for_every_remainder() -> None:
    """A state at a multiple of 64 carries the 64 lengths from there on: all remainders, three times."""
    shape = (1, 2, 8, 4)
    longest = 65_600
    inputs = random_inputs(longest, shape)
    lengths = (*range(65_535 - 32, 65_535 + 32), longest)
    state = torch.zeros(state_pool(1, shape).shape[1:])
    expected, _, states = definition(inputs, state, frozenset(lengths))
    q, k, v, g, beta = inputs
    for n in (lengths[0], 65_472 + 32, 65_535, 65_536, 65_537, longest):
        pool = state.repeat(1, 1, 1, 1)
        plan = ReferenceChunkPlan.build(torch.tensor([0]), (1,), (n,))
        out = chunk_gated_delta_rule(
            q[:n], k[:n], v[:n], g=g[:n], beta=beta[:n], pool=pool, plan=plan
        )
        torch.testing.assert_close(pool[0].double(), states[n], rtol=0, atol=2e-6)
        torch.testing.assert_close(out[-200:].double(), expected[n - 200 : n], rtol=0, atol=2e-6)
    begin = 65_472
    pool = state.repeat(1, 1, 1, 1)
    plan = ReferenceChunkPlan.build(torch.tensor([0]), (1,), (begin,))
    chunk_gated_delta_rule(
        q[:begin], k[:begin], v[:begin], g=g[:begin], beta=beta[:begin], pool=pool, plan=plan
    )
    for n in lengths:
        one = pool.clone()
        rows = slice(begin, n)
        plan = ReferenceChunkPlan.build(torch.tensor([0]), (1,), (n - begin,))
        chunk_gated_delta_rule(
            q[rows], k[rows], v[rows], g=g[rows], beta=beta[rows], pool=one, plan=plan
        )
        torch.testing.assert_close(one[0].double(), states[n], rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("order", ["ascending", "scattered", "two_runs_backwards"])
def test_steps_equal_the_definition(shape, order: str) -> None:
    """Five sequences, 70 steps each, states side by side or not; nobody else's state is touched."""
    slots = {
        "ascending": [3, 4, 5, 6, 7],
        "scattered": [9, 0, 4, 7, 2],
        "two_runs_backwards": [8, 7, 6, 2, 1],
    }[order]
    pool = state_pool(11, shape)
    initial = torch.randn(5, *pool.shape[1:])
    pool[slots] = initial
    sequences = [random_inputs(70, shape, seed=i) for i in range(5)]
    plan = SlotPlan.build(torch.tensor(slots), (1,) * 5)
    steps = []
    for t in range(70):
        q, k, v, g, beta = (torch.stack([s[i][t] for s in sequences]) for i in range(5))
        steps.append(gated_delta_step(q, k, v, g=g, beta=beta, pool=pool, plan=plan))
    out = torch.stack(steps, dim=1)
    for i, slot in enumerate(slots):
        expected, final, _ = definition(sequences[i], initial[i])
        torch.testing.assert_close(out[i].double(), expected, rtol=0, atol=3e-6)
        torch.testing.assert_close(pool[slot].double(), final, rtol=0, atol=3e-6)
    others = [slot for slot in range(11) if slot not in slots]
    assert pool[others].isnan().all()


def test_512_steps_stay_with_the_definition() -> None:
    """The state is fp32 and does not drift, whatever the dtype of what is fed to it."""
    shape = SHAPES["ratio_2"]
    inputs = [x.bfloat16() if i < 3 else x for i, x in enumerate(random_inputs(512, shape))]
    pool = torch.zeros(1, *state_pool(1, shape).shape[1:])
    expected, final, _ = definition(inputs, pool[0])
    plan = SlotPlan.build(torch.tensor([0]), (1,))
    q, k, v, g, beta = inputs
    for t in range(512):
        rows = slice(t, t + 1)
        out = gated_delta_step(
            q[rows], k[rows], v[rows], g=g[rows], beta=beta[rows], pool=pool, plan=plan
        )
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(pool[0].double(), final, rtol=0, atol=5e-6)
    torch.testing.assert_close(out[0].double(), expected[-1], rtol=8e-3, atol=1e-3)


def test_a_bf16_state_is_rounded_once_a_step() -> None:
    shape = SHAPES["ratio_2"]
    q, k, v, g, beta = random_inputs(6, shape)
    exact = torch.randn(8, *state_pool(1, shape).shape[1:]).bfloat16().float()
    pool, plan = exact.bfloat16(), SlotPlan.build(torch.tensor([7, 1, 2, 5, 0, 3]), (1,) * 6)
    out = gated_delta_step(q, k, v, g=g, beta=beta, pool=pool, plan=plan)
    assert torch.equal(out, gated_delta_step(q, k, v, g=g, beta=beta, pool=exact, plan=plan))
    assert torch.equal(pool, exact.bfloat16())


def test_e9_scratch_does_not_grow_with_the_prompt() -> None:
    """What is larger than the inputs themselves is as large for 4,000 tokens as for 20,000."""
    shape = (1, 2, 8, 4)
    largest = []
    for length in (4_000, 20_000):
        q, k, v, g, beta = random_inputs(length, shape)
        pool = torch.zeros(1, *state_pool(1, shape).shape[1:])
        plan = ReferenceChunkPlan.build(torch.tensor([0]), (1,), (length,))
        with LargestTensor() as watch:
            chunk_gated_delta_rule(q, k, v, g=g, beta=beta, pool=pool, plan=plan)
        largest.append(max(watch.numel, v.numel()))
    assert largest == [1024 * 2 * 64, max(1024 * 2 * 64, 20_000 * 2 * 4)]


@pytest.mark.parametrize("form", ["chunks", "steps"])
def test_a_sequence_of_nan_does_not_reach_the_others(form: str) -> None:
    shape = SHAPES["ratio_2"]
    results = []
    for bad in (False, True):
        inputs = random_inputs(30, shape)
        pool = torch.randn(
            4, *state_pool(1, shape).shape[1:], generator=torch.Generator().manual_seed(1)
        )
        if bad:
            pool[2] = NAN
            inputs[0][10:20] = inputs[2][10:20] = NAN
        q, k, v, g, beta = inputs
        slots = torch.tensor([3, 2, 1])
        if form == "chunks":
            plan = ReferenceChunkPlan.build(slots, (1, 1, 1), (10, 10, 10))
            out = chunk_gated_delta_rule(q, k, v, g=g, beta=beta, pool=pool, plan=plan)
        else:
            three = [x[[5, 15, 25]] for x in inputs]
            out = gated_delta_step(
                *three[:3],
                g=three[3],
                beta=three[4],
                pool=pool,
                plan=SlotPlan.build(slots, (1, 1, 1)),
            ).repeat_interleave(10, dim=0)
        results.append((out[[*range(10), *range(20, 30)]], pool[[3, 1, 0]]))
        assert out[10:20].isnan().any() == bad
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
