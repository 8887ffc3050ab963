"""The one-step kernel of the gated delta rule, and its gates."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minivllm_engine.ops.gated_delta import reference
from minivllm_engine.ops.gated_delta.plan import SlotPlan
from minivllm_engine.ops.gated_delta.triton import delta_gates, gated_delta_step
from support.kernel_checks import (
    NAN,
    TOLERANCES,
    assert_close,
    on_device,
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
) -> None:
    """Steps of sequences in scattered slots, the first of which begins, and of padding.

    Padding lanes with slot -1 stand first and last and between, and two of them are on the sink.
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
        widths = heads.H * heads.K, heads.H * heads.K, heads.HV * heads.V, heads.HV, heads.HV
        parts = random_rows(len(lanes), *widths, dtype=dtype)
        views = [on_device(part, device) for part in parts]
        out = gated_delta_step(
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
        g, beta = gates(parts[3][real], parts[4][real], log_decay, dt_bias)
        expected = reference.gated_delta_step(q, k, v, g=g, beta=beta, pool=pool, plan=plan)
        coarsest = max(dtype, state_dtype, key=lambda kind: TOLERANCES[kind])
        assert_close(out[real], expected, f"output of step {step}", via=coarsest)
        assert not out[slots.to(device) < 0].any(), "padding has an output"
        # beta is rounded to the dtype of b.
        rounded = None if rounds_as_torch(dtype) else dtype
        assert_close(kernel_pool[chosen], pool[chosen], f"states after step {step}", via=rounded)
        positions[real] += 1
    others = [slot for slot in range(sink) if slot not in chosen]
    assert kernel_pool[others].isnan().all(), "the state of another slot was touched"


def _by_head(parts, heads: Heads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v [N, heads, size]."""
    num_heads = heads.H, heads.H, heads.HV
    return tuple(x.unflatten(1, (n, -1)) for x, n in zip(parts, num_heads, strict=False))


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
