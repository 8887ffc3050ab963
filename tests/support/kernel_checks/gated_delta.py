"""The kernels of the gated delta rule, one step and several in a row, and its gates."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minivllm_engine.ops.gated_delta import reference
from minivllm_engine.ops.gated_delta.plan import ReferenceChunkPlan, SlotPlan
from minivllm_engine.ops.gated_delta.triton import (
    RecurrentPlan,
    delta_gates,
    gated_delta_recurrent,
    gated_delta_step,
    gather_states,
    scatter_states,
)
from support.kernel_checks import (
    NAN,
    TOLERANCES,
    assert_close,
    on_device,
    preceded,
    random_rows,
    rounds_as_torch,
    same_bits,
)


@dataclass(frozen=True)
class Heads:
    """H key heads of size K, HV value heads of size V."""

    H: int
    HV: int
    K: int
    V: int


def gates(a, b, log_decay, dt_bias):
    """g in fp32 from fp64, and beta in b's dtype."""
    g = -log_decay.double().exp() * F.softplus(a.double() + dt_bias.double())
    return g.float(), torch.sigmoid(b)


def gate_parameters(heads: Heads) -> tuple[torch.Tensor, torch.Tensor]:
    """A_log and dt_bias of the kind that trained models have."""
    return torch.rand(heads.HV) * 3 - 2, torch.randn(heads.HV) * 0.7 - 1


def check_steps(
    device: torch.device,
    dtype: torch.dtype,
    heads: Heads,
    *,
    state_dtype: torch.dtype = torch.float32,
    num_seqs: int = 4,
    num_steps: int = 2,
    step_rule: Callable[..., torch.Tensor] = gated_delta_step,
    rounds_beta: bool = True,
) -> None:
    """Steps of sequences in scattered slots, the first of which begins, and of padding.

    Padding lanes with slot -1 stand first and last and between, and two of them are on the sink.

    step_rule: takes what `gated_delta_step` takes.
    rounds_beta: does it round beta to the dtype of b?
    """
    torch.manual_seed(heads.HV * 1000 + heads.K + num_seqs)
    num_slots = 2 * num_seqs + 2
    sink = num_slots - 1
    chosen = torch.randperm(sink)[:num_seqs].tolist()
    lanes = [-1, *chosen[:1], sink, -1, *chosen[1:], sink, -1]
    real = [lane for lane, slot in enumerate(lanes) if slot in chosen]
    slots, positions = torch.tensor(lanes), torch.full((len(lanes),), 5)
    positions[[lane for lane, slot in enumerate(lanes) if slot < 0]] = 0
    positions[real[0]] = 0

    log_decay, dt_bias = gate_parameters(heads)
    pool = torch.full((num_slots, heads.HV, heads.V, heads.K), NAN, dtype=state_dtype)
    pool[chosen[1:]] = torch.randn(num_seqs - 1, heads.HV, heads.V, heads.K).to(state_dtype)
    kernel_pool = pool.to(device, copy=True)
    pool[chosen[0]] = 0
    plan = SlotPlan.build(slots[real], (1,) * num_seqs)
    for step in range(num_steps):
        if state_dtype != torch.float32:
            # Two roundings that fall out differently move the next step's states apart.
            pool[chosen[1:]] = kernel_pool[chosen[1:]].cpu()
            pool[chosen[:1]] = 0 if step == 0 else kernel_pool[chosen[:1]].cpu()
        parts = random_rows(len(lanes), *_widths(heads), dtype=dtype)
        views = [on_device(part, device) for part in parts]
        out = step_rule(
            *_by_head(views, heads),
            a=views[3],
            b=views[4],
            A_log=log_decay.to(device),
            dt_bias=dt_bias.to(device),
            pool=kernel_pool,
            slots=slots.to(device),
            positions=positions.to(device),
        )
        q, k, v = (x[real] for x in _by_head(parts, heads))
        raw = parts[4][real] if rounds_beta else parts[4][real].float()
        g, beta = gates(parts[3][real], raw, log_decay, dt_bias)
        expected = reference.gated_delta_step(q, k, v, g=g, beta=beta, pool=pool, plan=plan)
        coarsest = max(dtype, state_dtype, key=lambda kind: TOLERANCES[kind])
        assert_close(out[real], expected, f"output of step {step}", via=coarsest)
        assert not out[slots.to(device) < 0].any(), "padding has an output"
        # beta is rounded to the dtype of b.
        rounded = None if rounds_as_torch(dtype) or not rounds_beta else dtype
        assert_close(kernel_pool[chosen], pool[chosen], f"states after step {step}", via=rounded)
        positions[real] += 1
    others = [slot for slot in range(sink) if slot not in chosen]
    assert kernel_pool[others].isnan().all(), "the state of another slot was touched"


def _by_head(parts, heads: Heads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v [N, heads, size]."""
    num_heads = heads.H, heads.H, heads.HV
    return tuple(x.unflatten(1, (n, -1)) for x, n in zip(parts, num_heads, strict=False))


def _widths(heads: Heads) -> tuple[int, ...]:
    """Of q, k, v, a and b."""
    return heads.H * heads.K, heads.H * heads.K, heads.HV * heads.V, heads.HV, heads.HV


def check_recurrent(
    device: torch.device,
    dtype: torch.dtype,
    heads: Heads,
    spans: list[tuple[int, int]],
    *,
    state_dtype: torch.dtype = torch.float32,
) -> None:
    """spans: (tokens that came before, new tokens) of each sequence.

    Between them are sequences of padding, with rows of NaN and without, one on the sink, and one that
    begins but has no token yet.
    """
    torch.manual_seed(heads.HV * 1000 + heads.K + len(spans))
    sink = 2 * len(spans) + 1
    idle, *chosen = torch.randperm(sink)[: len(spans) + 1].tolist()
    first, *others = zip(chosen, spans, strict=True)
    lanes = [
        (-1, (0, 3)),
        first,
        (sink, (0, 2)),
        (idle, (0, 0)),
        *others,
        (-1, (9, 0)),
        (-1, (2, 1)),
    ]
    rows, real, at = [], [], 0
    for slot, (_, length) in lanes:
        real += range(at, at + length) if slot in chosen else ()
        rows += [slot >= 0] * length
        at += length
    parts = random_rows(at, *_widths(heads), dtype=dtype)
    for part in parts:
        part[~torch.tensor(rows)] = NAN
    log_decay, dt_bias = gate_parameters(heads)
    pool = torch.full((sink + 1, heads.HV, heads.V, heads.K), NAN, dtype=state_dtype)
    for slot, (start, _) in zip(chosen, spans, strict=True):
        if start:
            pool[slot] = torch.randn(heads.HV, heads.V, heads.K).to(state_dtype)
    own = pool.to(device, copy=True)
    slots, starts = [slot for slot, _ in lanes], [start for _, (start, _) in lanes]
    plan = RecurrentPlan.build(
        torch.tensor(slots, device=device), starts, [length for _, (_, length) in lanes]
    )
    plan = RecurrentPlan(plan.slots, preceded(plan.starts, 1), preceded(plan.bounds, 0))
    views = [on_device(part, device) for part in parts]
    out = gated_delta_recurrent(
        *_by_head(views, heads),
        a=views[3],
        b=views[4],
        A_log=log_decay.to(device),
        dt_bias=dt_bias.to(device),
        pool=own,
        plan=plan,
    )
    q, k, v = (x[real] for x in _by_head(parts, heads))
    g, beta = gates(parts[3][real], parts[4][real], log_decay, dt_bias)
    chunks = ReferenceChunkPlan.build(torch.tensor(chosen), *zip(*spans, strict=True))
    expected = reference.chunk_gated_delta_rule(q, k, v, g=g, beta=beta, pool=pool, plan=chunks)
    coarsest = max(dtype, state_dtype, key=lambda kind: TOLERANCES[kind])
    assert_close(out[real], expected, "output", via=dtype)
    assert_close(own[chosen], pool[chosen], "states", via=coarsest)
    untouched = [slot for slot in range(sink) if slot not in chosen]
    assert own[untouched].isnan().all(), "the state of another slot was touched"


def check_recurrent_is_steps(device: torch.device, dtype: torch.dtype, heads: Heads) -> None:
    """A chunk in one go, cut in two, and as so many steps: close, and the same bits after a cut."""
    torch.manual_seed(2)
    length = 9
    pool = torch.randn(3, heads.HV, heads.V, heads.K, device=device)
    parts = [on_device(part, device) for part in random_rows(length, *_widths(heads), dtype=dtype)]
    parameters = dict(zip(("A_log", "dt_bias"), gate_parameters(heads), strict=True))
    parameters = {name: x.to(device) for name, x in parameters.items()}
    slots = torch.tensor([2], device=device)

    def rows(first: int, last: int) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        some = [part[first:last] for part in parts]
        return _by_head(some, heads), {"a": some[3], "b": some[4], **parameters}

    def in_chunks(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
        states, outs, at = pool.clone(), [], 0
        for length in lengths:
            qkv, others = rows(at, at + length)
            plan = RecurrentPlan.build(slots, [5 + at], [length])
            outs.append(gated_delta_recurrent(*qkv, **others, pool=states, plan=plan))
            at += length
        return torch.cat(outs), states

    whole, cut = in_chunks(length), in_chunks(4, 1, length - 5)
    states, outs = pool.clone(), []
    for at in range(length):
        qkv, others = rows(at, at + 1)
        where = {"slots": slots, "positions": torch.tensor([5 + at], device=device)}
        outs.append(gated_delta_step(*qkv, **others, pool=states, **where))
    assert same_bits(cut[0], whole[0]) and same_bits(cut[1], whole[1])
    assert_close(torch.cat(outs), whole[0].cpu(), "outputs of steps")
    assert_close(states, whole[1].cpu(), "states after steps")


def check_order_of_lanes(device: torch.device, dtype: torch.dtype, heads: Heads) -> None:
    """A sequence gets the same bits wherever in a batch it stands, and alone."""
    torch.manual_seed(0)
    num_seqs = 5
    pool = torch.randn(num_seqs, heads.HV, heads.V, heads.K, device=device)
    shapes = [(heads.H, heads.K), (heads.H, heads.K), (heads.HV, heads.V)]
    qkv = [torch.randn(num_seqs, *shape).to(device, dtype) for shape in shapes]
    ab = [torch.randn(num_seqs, heads.HV).to(device, dtype) for _ in range(2)]
    parameters = [x.to(device) for x in gate_parameters(heads)]

    def run(order: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        states = pool.clone()
        out = gated_delta_step(
            *(x[order] for x in qkv),
            a=ab[0][order],
            b=ab[1][order],
            A_log=parameters[0],
            dt_bias=parameters[1],
            pool=states,
            slots=torch.tensor(order, device=device),
            positions=torch.ones(len(order), dtype=torch.int64, device=device),
        )
        return out, states[order]

    whole = run(list(range(num_seqs)))
    for order in ([3], [4, 1, 0], [2, 0, 4, 3, 1]):
        for some, all_of_them in zip(run(order), whole, strict=True):
            assert same_bits(some, all_of_them[order])


def check_gates(device: torch.device, dtype: torch.dtype, num_tokens: int, num_heads: int) -> None:
    """Also where softplus is tiny, and where it is its argument."""
    torch.manual_seed(num_tokens)
    a, b = random_rows(num_tokens, num_heads, num_heads, dtype=dtype)
    a.mul_(12)
    b.mul_(4)
    log_decay, dt_bias = gate_parameters(Heads(num_heads, num_heads, 1, 1))
    g, beta = delta_gates(
        on_device(a, device), on_device(b, device), log_decay.to(device), dt_bias.to(device)
    )
    expected_g, expected_beta = gates(a, b, log_decay, dt_bias)
    assert_close(beta, expected_beta, "beta")
    torch.testing.assert_close(g.cpu(), expected_g, rtol=1e-5, atol=0)


def check_states(device: torch.device, state_dtype: torch.dtype) -> None:
    """Out of their slots and back, of padding nothing; who begins gets zeros, and not what is there."""
    torch.manual_seed(4)
    shape, slots, starts = (3, 40, 36), [4, -1, 0, 2, -1], [7, 9, 0, 1, 0]
    pool = torch.full((6, *shape), NAN, dtype=state_dtype, device=device)
    pool[[4, 2]] = torch.randn(2, *shape, device=device).to(state_dtype)
    where = torch.tensor([1, *slots], dtype=torch.int32, device=device)[1:]
    before = pool.clone()
    states = gather_states(pool, where, torch.tensor(starts, device=device))
    assert states.dtype == torch.float32 and same_bits(pool, before)
    for lane, slot in enumerate(slots):
        wanted = pool[slot].float() if lane in (0, 3) else torch.zeros(shape, device=device)
        assert same_bits(states[lane], wanted), f"lane {lane}"
    states = torch.randn(states.shape, device=device)
    scatter_states(states, pool, where)
    for slot in range(len(pool)):
        if slot in slots:
            expected = states[slots.index(slot)].to(state_dtype)
            assert_close(pool[slot], expected.cpu(), f"slot {slot}")
        else:
            assert same_bits(pool[slot], before[slot]), f"slot {slot} was touched"
