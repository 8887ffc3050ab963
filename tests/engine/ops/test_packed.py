"""Weights laid out by oneDNN: the plain product's values, and a row's bits whatever stands beside it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from minivllm_engine.models.layers.weight import pack_weights, weight_matrix
from minivllm_engine.ops import packed
from minivllm_engine.ops.packed import PackedWeight, Packing
from minivllm_engine.ops.products import linear, output_head
from minivllm_engine.ops.reference_backend import REFERENCE

PACKING = Packing()
DTYPES = [
    pytest.param(
        dtype,
        marks=pytest.mark.skipif(
            not PACKING.suits(1024, 1024, dtype), reason="oneDNN cannot compute in it here"
        ),
    )
    for dtype in (torch.float32, torch.bfloat16)
]
# One piece, a piece and a rest, pieces that end even, an odd number of outputs.
SHAPES = [(1024, 640), (1100, 513), (3072, 512), (2100, 333)]


def packed_weight(
    num_in: int, num_out: int, dtype: torch.dtype
) -> tuple[torch.Tensor, PackedWeight]:
    torch.manual_seed(num_in + num_out)
    weight = torch.randn(num_in, num_out).to(dtype)
    result = PACKING.pack(weight)
    assert result is not None, "this processor's library does not keep a row's bits"
    return weight, result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
def test_a_packed_product_is_the_product(num_in: int, num_out: int, dtype: torch.dtype) -> None:
    weight, packed_one = packed_weight(num_in, num_out, dtype)
    x, bias = torch.randn(9, num_in).to(dtype), torch.randn(num_out).to(dtype)
    exact = x.double() @ weight.double()
    rounding = {torch.float32: 2e-6, torch.bfloat16: 6e-3}[dtype] * exact.abs().max()
    torch.testing.assert_close(linear(x, packed_one).double(), exact, atol=rounding, rtol=0)
    with_bias = linear(x, packed_one, bias).double()
    torch.testing.assert_close(with_bias, exact + bias.double(), atol=rounding, rtol=0)
    torch.testing.assert_close(output_head(x, packed_one).double(), exact, atol=rounding, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
def test_the_bits_of_a_row_do_not_depend_on_the_others(
    num_in: int, num_out: int, dtype: torch.dtype
) -> None:
    _, weight = packed_weight(num_in, num_out, dtype)
    x = torch.randn(300, num_in).to(dtype)
    alone = torch.cat([weight.multiply(row[None]) for row in x[:12]])
    for rows in (2, 3, 5, 8, 12, 16, 17, 31, 33, 64, 100, 129, 300):
        together = weight.multiply(x[:rows])
        assert torch.equal(together[:12], alone[:rows]), rows
    # Nor on the place in the step.
    assert torch.equal(weight.multiply(x.flip(0))[-12:].flip(0), alone)


def test_a_library_that_mixes_rows_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    product = packed._product

    def mixing(x: torch.Tensor, piece: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return product(x, piece, bias) * (1 + 1e-6 * (x.shape[0] > 8))

    monkeypatch.setattr(packed, "_product", mixing)
    packing = Packing()
    if not packing.suits(1024, 512, torch.float32):
        pytest.skip("nothing is packed on this processor")
    assert packing.pack(torch.randn(1024, 512)) is None
    # The module then keeps the plain weight, laid out for the plain products.
    operations = replace(REFERENCE, packing=packing)
    module = nn.Module()
    module.matrix = weight_matrix(
        1024, 512, operations=operations, dtype=torch.float32, device=torch.device("cpu")
    )
    nn.init.normal_(module.matrix)
    before = module.matrix.clone()
    pack_weights(module, ["matrix"], operations)
    assert isinstance(module.matrix, nn.Parameter)
    assert module.matrix.is_contiguous() and torch.equal(module.matrix, before)


def test_small_weights_and_fp16_stay_as_they_are() -> None:
    assert not PACKING.suits(256, 768, torch.float32)
    assert not PACKING.suits(4096, 4096, torch.float16)
