"""Norms, activations, and what is done to queries and keys before attention."""

import torch

from minivllm_engine.ops.fused import reference, triton
from support.kernel_checks import (
    NAN,
    assert_close,
    on_device,
    preceded,
    random_rows,
    rounds_as_torch,
    same_bits,
)

EPS = torch.tensor([1e-6])


def check_norms(device: torch.device, dtype: torch.dtype, num_rows: int, size: int) -> None:
    torch.manual_seed(size)
    x, residual = random_rows(num_rows, size, size, dtype=dtype)
    scale = 1 + 0.3 * torch.randn(size)
    there = on_device(x, device), scale.to(device), EPS.to(device)
    assert_close(triton.rms_norm(*there), reference.rms_norm(x, scale, EPS), "norm")
    total = on_device(residual, device)
    out = triton.add_rms_norm(there[0], total, *there[1:])
    expected = reference.add_rms_norm(x, residual, scale, EPS)
    assert_close(out, expected, "norm of the sum")
    if rounds_as_torch(dtype):
        assert same_bits(total, residual), "sum"
    assert_close(total, residual, "sum")


def check_gated_norm(
    device: torch.device, dtype: torch.dtype, num_tokens: int, num_heads: int, size: int
) -> None:
    torch.manual_seed(size)
    x = torch.randn(num_tokens, num_heads, size).to(dtype)
    (gate,) = random_rows(num_tokens, num_heads * size, dtype=dtype)
    weight = 1 + 0.3 * torch.randn(size)
    out = triton.gated_rms_norm(
        x.to(device),
        on_device(gate, device).unflatten(1, (num_heads, size)),
        weight.to(device),
        EPS.to(device),
    )
    expected = reference.gated_rms_norm(x, gate.unflatten(1, (num_heads, size)), weight, EPS)
    assert_close(out, expected, "gated norm")


def check_activations(device: torch.device, dtype: torch.dtype, num_rows: int, size: int) -> None:
    torch.manual_seed(size)
    (gate_up,) = random_rows(num_rows, 2 * size, dtype=dtype)
    out = triton.silu_mul(on_device(gate_up, device))
    assert_close(out, reference.silu_mul(gate_up), "silu * up")
    x = torch.randn(num_rows, size).to(dtype)
    gate = gate_up[:, :size]
    there = on_device(gate, device)
    out = triton.sigmoid_mul(x.to(device, copy=True), there)
    assert_close(out, reference.sigmoid_mul(x, gate), "x * sigmoid")


def check_rotary(
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
) -> None:
    """Some of the tokens are padding, whose keys and values go nowhere."""
    torch.manual_seed(head_dim + num_tokens)
    block_size, rotated = 16, num_heads + num_kv_heads
    num_blocks = -(-num_tokens // block_size) + 2
    query_key, value = random_rows(
        num_tokens, rotated * head_dim, num_kv_heads * head_dim, dtype=dtype
    )
    angles = torch.rand(num_tokens, 1, rotary_dim // 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    scale = 1 + 0.3 * torch.randn(rotated, head_dim)
    kv_slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    padding = torch.arange(num_tokens) % 5 == 3
    cache_shape = (num_blocks, block_size, num_kv_heads, head_dim)
    caches = [torch.full(cache_shape, NAN, dtype=dtype) for _ in range(2)]
    kernel_caches = [cache.to(device, copy=True) for cache in caches]

    def by_head(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, head_dim))

    out = triton.norm_rotate_write(
        by_head(on_device(query_key, device)),
        by_head(on_device(value, device)),
        scale=scale.to(device),
        eps=EPS.to(device),
        cos=cos.to(device),
        sin=sin.to(device),
        keys=kernel_caches[0],
        values=kernel_caches[1],
        kv_slots=kv_slots.masked_fill(padding, -1).to(device),
    )
    expected = reference.norm_rotate_write(
        by_head(query_key),
        by_head(value),
        scale=scale,
        eps=EPS,
        cos=cos,
        sin=sin,
        keys=caches[0],
        values=caches[1],
        kv_slots=kv_slots,
    )
    for cache in caches:
        cache.view(-1, num_kv_heads, head_dim)[kv_slots[padding]] = NAN
    # The reference rounds three times, and before it subtracts.
    assert_close(out, expected, "queries", size=8)
    written = ~caches[0].isnan()
    assert torch.equal(written, ~kernel_caches[0].isnan().cpu())
    assert_close(kernel_caches[0][written.to(device)], caches[0][written], "keys", size=8)
    assert same_bits(kernel_caches[1], caches[1]), "values"


def check_angles(
    device: torch.device, dtype: torch.dtype, rotary_dim: int, factor: float = 1.0
) -> None:
    """Positions of all sizes up to 262,144, in integers of both kinds, within the last bit of the dtype.

    The reference runs on the same device: what is compared is the sine, and not the libraries below it.
    """
    numbers = [0, 1, 2, 3, 7, 63, 64, 1000, 8191, 65_537, 100_003, 200_001, 262_143, 262_144]
    frequencies = 1e7 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    # What lies behind the frequencies and before the positions is not to be read.
    frequencies = torch.cat((frequencies, torch.full((8,), NAN)))[: rotary_dim // 2].to(device)
    for integers in (torch.int32, torch.int64):
        positions = preceded(torch.tensor(numbers, dtype=integers, device=device), 5)
        found = triton.rotary_cos_sin(positions, frequencies, factor, dtype)
        expected = reference.rotary_cos_sin(positions, frequencies, factor, dtype)
        for own, other in zip(found, expected, strict=True):
            assert own.shape == other.shape and own.dtype == dtype and own.is_contiguous()
            assert_last_bit(own, other)


def assert_last_bit(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """At most one unit in the last place apart, in fp32 two; below 2^-10, units of 2^-10."""
    size = expected.double().abs().clamp(min=2**-10)
    unit = torch.finfo(actual.dtype).eps * torch.exp2(size.log2().floor())
    apart = (actual.double() - expected.double()).abs() / unit
    most = 2 if actual.dtype == torch.float32 else 1
    assert float(apart.max()) <= most, f"{float(apart.max())} units apart"
