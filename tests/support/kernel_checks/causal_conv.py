"""The kernels of the causal convolution: one step, and packed sequences."""

import torch

from minivllm_engine.ops.causal_conv import reference
from minivllm_engine.ops.causal_conv.triton import (
    TritonConvPlan,
    causal_conv_prefill,
    causal_conv_step,
)
from support.kernel_checks import (
    NAN,
    assert_close,
    on_device,
    preceded,
    random_rows,
    same_bits,
    with_padding,
)


def check_steps(
    device: torch.device,
    dtype: torch.dtype,
    num_channels: int,
    conv_width: int,
    *,
    num_seqs: int = 4,
    num_steps: int = 5,
) -> None:
    """Steps of sequences in scattered slots, the first of which begins, and of padding."""
    torch.manual_seed(num_channels + conv_width)
    num_slots = 2 * num_seqs + 2
    sink = num_slots - 1
    chosen = torch.randperm(sink)[:num_seqs].tolist()
    lanes = [-1, *chosen, sink, -1, sink]
    real = slice(1, 1 + num_seqs)
    slots, positions = torch.tensor(lanes), torch.zeros(len(lanes), dtype=torch.int64)
    positions[2 : 1 + num_seqs] = 7
    conv_weight = torch.randn(conv_width, num_channels).to(dtype)
    pool = torch.full((num_slots, num_channels, conv_width - 1), NAN, dtype=dtype)
    pool[chosen[1:]] = torch.randn(num_seqs - 1, *pool.shape[1:]).to(dtype)
    kernel_pool = pool.to(device, copy=True)
    pool[chosen[0]] = 0
    for step in range(num_steps):
        (x,) = random_rows(len(lanes), num_channels, dtype=dtype)
        out = causal_conv_step(
            on_device(x, device),
            kernel_pool,
            conv_weight.to(device),
            slots=slots.to(device),
            positions=positions.to(device),
        )
        expected = reference.causal_conv_step(
            x[real], pool, conv_weight.float().unbind(0), torch.tensor(chosen)
        )
        assert_close(out[real], expected, f"output of step {step}")
        assert not out[slots.to(device) < 0].any(), "padding has an output"
        assert same_bits(kernel_pool[chosen], pool[chosen]), f"history after step {step}"
        positions[real] += 1
    others = [slot for slot in range(sink) if slot not in chosen]
    assert kernel_pool[others].isnan().all(), "the history of another slot was touched"


def check_prefill(
    device: torch.device,
    dtype: torch.dtype,
    num_channels: int,
    conv_width: int,
    spans: list[tuple[int, int]],
) -> None:
    """spans: (tokens that came before, new tokens) of each sequence."""
    torch.manual_seed(num_channels + conv_width)
    starts, lengths = zip(*spans, strict=True)
    num_slots = 2 * len(spans) + 1
    unused, *chosen = torch.randperm(num_slots)[: 1 + len(spans)].tolist()
    slots = torch.tensor(chosen)
    conv_weight = torch.randn(conv_width, num_channels).to(dtype)
    pool = torch.full((num_slots, num_channels, conv_width - 1), NAN, dtype=dtype)
    for slot, start in zip(slots.tolist(), starts, strict=True):
        if start:
            pool[slot] = torch.randn(pool.shape[1:]).to(dtype)
    kernel_pool = pool.to(device, copy=True)
    (x,) = random_rows(sum(lengths), num_channels, dtype=dtype)
    plan = TritonConvPlan.build(slots.to(device), starts, lengths)
    plan = TritonConvPlan(preceded(plan.slots, unused), with_padding(plan.sequences))
    out = causal_conv_prefill(on_device(x, device), kernel_pool, conv_weight.to(device), plan)
    out = out.view(x.shape)
    reference_plan = reference.ReferenceConvPlan.build(slots, starts, lengths, conv_width)
    expected = reference.causal_conv_prefill(x, pool, conv_weight.float().unbind(0), reference_plan)
    assert_close(out, expected, "output")
    assert same_bits(kernel_pool, pool), "histories"


def check_heads(device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int, int]) -> None:
    """Queries, keys and values apart, the first two normed or not.

    heads: H key heads of size K, HV value heads of size V.
    """
    num_heads, key_size, num_values, value_size = heads
    keys, values = num_heads * key_size, num_values * value_size
    torch.manual_seed(keys)
    lengths, slots = (5, 1, 18), torch.tensor([2, 0, 3])
    conv_weight = torch.randn(4, 2 * keys + values).to(dtype)
    (x,) = random_rows(sum(lengths), 2 * keys + values, dtype=dtype)
    pool = torch.randn(4, 2 * keys + values, 3).to(dtype)
    reference_plan = reference.ReferenceConvPlan.build(slots, (0, 7, 0), lengths, 4)
    kernel_pool = pool.to(device, copy=True)
    expected = reference.causal_conv_prefill(x, pool, conv_weight.float().unbind(0), reference_plan)
    parts = [
        part.unflatten(1, (count, -1))
        for part, count in zip(
            expected.split([keys, keys, values], dim=1),
            (num_heads, num_heads, num_values),
            strict=True,
        )
    ]
    for normed in (False, True):
        plan = TritonConvPlan.build(slots.to(device), (0, 7, 0), lengths, normed=normed)
        out = causal_conv_prefill(
            on_device(x, device),
            kernel_pool.clone(),
            conv_weight.to(device),
            plan,
            key_dim=keys,
            num_heads=num_heads,
        )
        apart = out.split([part.numel() for part in parts])
        for name, one, raw in zip("qkv", apart, parts, strict=True):
            wanted = raw
            if normed and name != "v":
                wide = raw.float()
                wanted = (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(dtype)
            assert_close(one.view(raw.shape), wanted, f"{name}, normed: {normed}")
