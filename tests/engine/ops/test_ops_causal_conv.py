"""The causal convolution against torch's conv1d, with carried history."""

import pytest
import torch
import torch.nn.functional as F

from minivllm_engine.ops.causal_conv.reference import (
    ReferenceConvPlan,
    causal_conv_prefill,
    causal_conv_step,
)

CHANNELS = 10
NAN = float("nan")


def definition(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, D] of a whole sequence, weight [W, D]."""
    conv_width = weight.shape[0]
    padded = F.pad(x.t(), (conv_width - 1, 0)).unsqueeze(0)
    return F.silu(F.conv1d(padded, weight.t().unsqueeze(1), groups=x.shape[1])[0].t())


def tail(x: torch.Tensor, conv_width: int) -> torch.Tensor:
    """The history after a whole sequence x: [D, W - 1], oldest first."""
    return F.pad(x.t(), (conv_width - 1, 0))[:, x.shape[0] :]


@pytest.mark.parametrize("conv_width", [2, 3, 4])
@pytest.mark.parametrize("chunks", [(1, 1, 1, 1, 1, 6), (2, 9), (3, 1, 7), (11,)])
def test_packed_chunks_with_history(conv_width: int, chunks: tuple[int, ...]) -> None:
    """Three sequences go through the same chunks side by side, the third one token behind."""
    weight = torch.randn(conv_width, CHANNELS)
    whole = [torch.randn(sum(chunks) + 1, CHANNELS) for _ in range(3)]
    slots = torch.tensor([4, 0, 2])
    pool = torch.full((5, CHANNELS, conv_width - 1), NAN)
    done, outputs = [0, 0, 0], [[], [], []]
    for step in (*chunks, 1):
        lengths = (step, step, 1 if done[2] == 0 else step)
        lengths = tuple(min(n, len(whole[0]) - d) for n, d in zip(lengths, done, strict=True))
        alive = [i for i in range(3) if lengths[i]]
        x = torch.cat([whole[i][done[i] : done[i] + lengths[i]] for i in alive])
        starts, some = (tuple(x[i] for i in alive) for x in (done, lengths))
        plan = ReferenceConvPlan.build(slots[alive], starts, some, conv_width)
        out = causal_conv_prefill(x, pool, weight.float().unbind(0), plan)
        for i, part in zip(alive, out.split([lengths[i] for i in alive]), strict=True):
            outputs[i].append(part)
            done[i] += lengths[i]
    for i in range(3):
        x = whole[i][: done[i]]
        torch.testing.assert_close(torch.cat(outputs[i]), definition(x, weight))
        assert torch.equal(pool[slots[i]], tail(x, conv_width))
    assert pool[[1, 3]].isnan().all()


@pytest.mark.parametrize("conv_width", [2, 3, 4])
def test_steps(conv_width: int) -> None:
    weight = torch.randn(conv_width, CHANNELS)
    whole = torch.randn(3, 9, CHANNELS)
    slots = torch.tensor([3, 4, 1])
    pool = torch.full((6, CHANNELS, conv_width - 1), NAN)
    pool[slots] = 0
    steps = [causal_conv_step(whole[:, t], pool, weight.unbind(0), slots) for t in range(9)]
    for i in range(3):
        torch.testing.assert_close(torch.stack(steps, 1)[i], definition(whole[i], weight))
        assert torch.equal(pool[slots[i]], tail(whole[i], conv_width))
    assert pool[[0, 2, 5]].isnan().all()


def test_sums_are_taken_in_fp32_and_rounded_once() -> None:
    weight = torch.randn(4, CHANNELS).bfloat16()
    x = torch.randn(7, CHANNELS).bfloat16()
    pool = torch.zeros(1, CHANNELS, 3, dtype=torch.bfloat16)
    plan = ReferenceConvPlan.build(torch.tensor([0]), (0,), (7,), 4)
    out = causal_conv_prefill(x, pool, weight.float().unbind(0), plan)
    sums = F.conv1d(
        F.pad(x.float().t(), (3, 0)).unsqueeze(0), weight.float().t().unsqueeze(1), groups=CHANNELS
    )
    assert torch.equal(out, F.silu(sums[0].t().bfloat16()))
    again = torch.zeros_like(pool)
    steps = [
        causal_conv_step(x[t : t + 1], again, weight.float().unbind(0), torch.tensor([0]))
        for t in range(7)
    ]
    assert torch.equal(torch.cat(steps), out)
    assert torch.equal(again, pool)
