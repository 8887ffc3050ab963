"""Small-batch products: every operation, over rows that lie apart and weights between NaN."""

import torch

from minivllm_engine.ops.small_batch import reference, triton
from minivllm_engine.ops.small_batch.tiles import Tile
from support.kernel_checks import (
    NAN,
    TOLERANCES,
    assert_close,
    on_device,
    random_rows,
    rounds_as_torch,
)
from support.kernel_checks.fused import EPS

# Of intermediate values: sums of thousands of products, and what they are multiplied with after that.
_SIZE = 4


def assert_product(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Close; less so where three bf16 numbers, each cut off in the interpreter, make one."""
    if rounds_as_torch(actual.dtype):
        assert_close(actual, expected, what, size=_SIZE)
    else:
        rtol, atol = TOLERANCES[actual.dtype]
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=3 * rtol, atol=_SIZE * atol)


def random_weight(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Products of it are about as large as what it is multiplied with. Before and after it is NaN."""
    size, margin = num_outputs * num_inputs, 4 * num_inputs
    memory = torch.full((size + 2 * margin,), NAN, dtype=dtype)
    memory[margin : margin + size] = torch.randn(size) * num_inputs**-0.5
    return memory[margin : margin + size].view(num_outputs, num_inputs)


def random_scale(size: int) -> torch.Tensor:
    """Of a norm, with NaN after it."""
    return torch.cat((1 + 0.3 * torch.randn(size), torch.full((8,), NAN)))[:size]


class Inputs:
    """Draws operands, and keeps of each a copy on the device that lies there as here."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def rows(
        self, num_rows: int, *shape: int, beside: int = 8
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_rows, *shape], the rows apart and NaN between them. beside: numbers of the same rows."""
        widths = beside, torch.Size(shape).numel()
        part = random_rows(num_rows, *widths, dtype=self.dtype)[1]
        return part.unflatten(1, shape), on_device(part, self.device).unflatten(1, shape)

    def weight(self, num_outputs: int, num_inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._both(random_weight(num_outputs, num_inputs, self.dtype))

    def bias(self, size: int, wanted: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self._both(torch.randn(size).to(self.dtype)) if wanted else (None, None)

    def scale(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._both(random_scale(size))

    def _both(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, on_device(x, self.device) if x._base is not None else x.to(self.device)


def check_norm_linear(
    device: torch.device,
    dtype: torch.dtype,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    *,
    bias: bool = False,
    tile: Tile | None = None,
) -> None:
    """A product after a norm, and the same of twice the outputs with SwiGLU."""
    torch.manual_seed(num_inputs + num_rows)
    draw, eps = Inputs(device, dtype), EPS.to(device)
    (x, x_there), (scale, scale_there) = draw.rows(num_rows, num_inputs), draw.scale(num_inputs)
    weight, weight_there = draw.weight(num_outputs, num_inputs)
    offset, offset_there = draw.bias(num_outputs, bias)
    out = triton.norm_linear(x_there, scale_there, eps, weight_there, offset_there, tile=tile)
    expected = reference.norm_linear(x, scale, EPS, weight, offset)
    assert_product(out, expected, "product of a norm")
    gate_up, gate_up_there = draw.weight(2 * num_outputs, num_inputs)
    out = triton.norm_linear_swiglu(x_there, scale_there, eps, gate_up_there, tile=tile)
    expected = reference.norm_linear_swiglu(x, scale, EPS, gate_up)
    assert_product(out, expected, "SwiGLU of a norm")


def check_linear_add(
    device: torch.device,
    dtype: torch.dtype,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    *,
    bias: bool = False,
    tile: Tile | None = None,
) -> None:
    torch.manual_seed(num_inputs + num_rows)
    draw = Inputs(device, dtype)
    x, x_there = draw.rows(num_rows, num_inputs)
    residual, residual_there = draw.rows(num_rows, num_outputs)
    weight, weight_there = draw.weight(num_outputs, num_inputs)
    offset, offset_there = draw.bias(num_outputs, bias)
    triton.linear_add_(x_there, weight_there, residual_there, offset_there, tile=tile)
    reference.linear_add_(x, weight, residual, offset)
    assert_product(residual_there, residual, "sum")
    assert_nothing_else_was_written(residual_there)


def check_gated_products(
    device: torch.device,
    dtype: torch.dtype,
    num_rows: int,
    num_heads: int,
    size: int,
    num_outputs: int,
    *,
    tile: Tile | None = None,
) -> None:
    """The ends of DeltaNet and of attention, the second with a bias and without one."""
    torch.manual_seed(num_heads * size + num_rows)
    draw, num_inputs = Inputs(device, dtype), num_heads * size
    x, x_there = draw.rows(num_rows, num_heads, size)
    gate, gate_there = draw.rows(num_rows, num_heads, size, beside=200)
    weight, weight_there = draw.weight(num_outputs, num_inputs)
    scale, scale_there = draw.scale(size)
    residual, there = draw.rows(num_rows, num_outputs)
    triton.gated_norm_linear_add_(
        x_there, gate_there, scale_there, EPS.to(device), weight_there, there, tile=tile
    )
    reference.gated_norm_linear_add_(x, gate, scale, EPS, weight, residual)
    assert_product(there, residual, "end of DeltaNet")
    assert_nothing_else_was_written(there)
    for bias in (False, True):
        residual, there = draw.rows(num_rows, num_outputs)
        offset, offset_there = draw.bias(num_outputs, bias)
        triton.sigmoid_gate_linear_add_(
            x_there, gate_there, weight_there, there, offset_there, tile=tile
        )
        reference.sigmoid_gate_linear_add_(x.clone(), gate, weight, residual, offset)
        assert_product(there, residual, "end of attention")
        assert_nothing_else_was_written(there)


def assert_nothing_else_was_written(part: torch.Tensor) -> None:
    """On both sides of the rows that `Inputs.rows` gives is NaN, unless something wrote there."""
    memory, first = part._base, part.storage_offset()
    assert memory is not None
    rows = memory.view(part.shape[0], -1)
    sides = rows[:, first - 8 : first], rows[:, first + part.shape[1] :]
    assert all(side.isnan().all() for side in sides), "written outside of the rows"
