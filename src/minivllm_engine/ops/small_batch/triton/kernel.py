"""The one kernel of the small-batch products: activations of B rows, times a tile of a weight, and its end.

The tile's numbers are multiplied where they were loaded: no thread needs what another one loaded before the
sums are taken, and 16 bytes are loaded at a time. The first tile is on its way before the kernels before
this one are done, where it may start so early.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# What is done to the input, and to the products.
PLAIN = tl.constexpr(0)
NORM = tl.constexpr(1)
GATED_NORM = tl.constexpr(2)
SIGMOID_GATE = tl.constexpr(3)

STORE = tl.constexpr(0)
ADD = tl.constexpr(1)
SWIGLU = tl.constexpr(2)

# Products of neighbouring inputs that are summed at once, in the thread that loaded them.
_GROUP = tl.constexpr(8)


@triton.jit
def _appended(items, item):
    return items + (item,)  # noqa: RUF005


@triton.jit
def _columns(chunk, IN: tl.constexpr, BLOCK_IN: tl.constexpr, HEAD: tl.constexpr):
    """[BLOCK_IN] inputs of a chunk, and which of them there are. Heads start at powers of two."""
    lane = tl.arange(0, BLOCK_IN)
    block: tl.constexpr = triton.next_power_of_2(HEAD)
    if block == HEAD or HEAD == IN:
        columns = chunk * BLOCK_IN + lane
        mask = columns < IN
    else:
        inside = lane % block
        columns = (chunk * (BLOCK_IN // block) + lane // block) * HEAD + inside
        mask = (columns < IN) & (inside < HEAD)
    return columns, mask


@triton.jit
def _weight_tile(row_at, row_mask, columns, mask):
    """These columns of the rows that begin at row_at."""
    return tl.load(
        row_at[:, None] + columns[None, :],
        mask=row_mask[:, None] & mask[None, :],
        other=0.0,
        eviction_policy="evict_first",
    )


@triton.jit
def _load_rows(x, x_row, columns, mask, B: tl.constexpr):
    """The same columns of each of B rows."""
    rows = ()
    for row in tl.static_range(B):
        rows = _appended(rows, tl.load(x + row * x_row + columns, mask=mask, other=0.0))
    return rows


@triton.jit
def _head_norm(numbers, eps, HEAD: tl.constexpr):
    """Each head of a chunk over its rms."""
    size: tl.constexpr = numbers.shape[0]
    block: tl.constexpr = triton.next_power_of_2(HEAD)
    heads = tl.reshape(numbers, (size // block, block))
    inverse = tl.rsqrt(tl.sum(heads * heads, axis=1) / HEAD + eps)
    return tl.reshape(heads * inverse[:, None], (size,))


@triton.jit
def _activations(numbers, gates, factors, inverse, eps, INPUT: tl.constexpr, HEAD: tl.constexpr):
    """A chunk of a row as it is multiplied: fp32, but rounded as if it had been stored.

    numbers, gates: of the row. factors: of the norm. inverse: 1 / rms of the whole row.
    """
    dtype = numbers.dtype
    numbers = numbers.to(tl.float32)
    if INPUT == NORM:
        numbers = (numbers * inverse * factors).to(dtype).to(tl.float32)
    elif INPUT == GATED_NORM:
        gates = gates.to(tl.float32)
        normed = _head_norm(numbers, eps, HEAD).to(dtype).to(tl.float32)
        numbers = (gates * tl.sigmoid(gates) * factors * normed).to(dtype).to(tl.float32)
    elif INPUT == SIGMOID_GATE:
        gates = tl.sigmoid(gates.to(tl.float32)).to(dtype).to(tl.float32)
        numbers = (numbers * gates).to(dtype).to(tl.float32)
    return numbers


@triton.jit
def _multiply_add(
    sums,
    tile,
    factors,
    numbers,
    gates,
    inverses,
    eps,
    B: tl.constexpr,
    INPUT: tl.constexpr,
    HEAD: tl.constexpr,
):
    """sums, for each of B rows one [rows of the tile, groups], with the products of a tile added."""
    weights = tile.to(tl.float32)
    shape: tl.constexpr = (tile.shape[0], tile.shape[1] // _GROUP, _GROUP)
    new = ()
    for row in tl.static_range(B):
        inputs = _activations(numbers[row], gates[row], factors, inverses[row], eps, INPUT, HEAD)
        products = tl.reshape(weights * inputs[None, :], shape)
        new = _appended(new, sums[row] + tl.sum(products, axis=2))
    return new


@triton.jit
def _total(sums, B: tl.constexpr, PADDED: tl.constexpr):
    """[rows, PADDED] of B sums [rows, groups]: one exchange between threads for all of them."""
    stacked = sums
    for _ in tl.static_range(PADDED - B):
        stacked = _appended(stacked, tl.zeros_like(sums[0]))
    rows: tl.constexpr = sums[0].shape[0]
    groups: tl.constexpr = sums[0].shape[1]
    if PADDED == 8:
        stacked = (
            tl.join(stacked[0], stacked[4]),
            tl.join(stacked[1], stacked[5]),
            tl.join(stacked[2], stacked[6]),
            tl.join(stacked[3], stacked[7]),
        )
    if PADDED >= 4:
        stacked = (tl.join(stacked[0], stacked[2]), tl.join(stacked[1], stacked[3]))
    if PADDED >= 2:
        stacked = (tl.join(stacked[0], stacked[1]),)
    return tl.sum(tl.reshape(stacked[0], (rows, groups, PADDED)), axis=1)


@triton.jit
def _inverse_rms(
    first,
    x,
    x_row,
    eps,
    B: tl.constexpr,
    PADDED: tl.constexpr,
    IN: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """1 / rms of each of B rows, whose first chunks are there already."""
    squares = ()
    for row in tl.static_range(B):
        numbers = first[row].to(tl.float32)
        total = numbers * numbers
        for chunk in range(1, CHUNKS):
            columns, mask = _columns(chunk, IN, BLOCK_IN, IN)
            numbers = tl.load(x + row * x_row + columns, mask=mask, other=0.0).to(tl.float32)
            total += numbers * numbers
        groups = tl.reshape(total, (1, BLOCK_IN // _GROUP, _GROUP))
        squares = _appended(squares, tl.sum(groups, axis=2))
    all_inverses = tl.rsqrt(_total(squares, B, PADDED) / IN + eps)
    lanes = tl.arange(0, PADDED)[None, :]
    inverses = ()
    for row in tl.static_range(B):
        inverses = _appended(
            inverses, tl.sum(tl.sum(tl.where(lanes == row, all_inverses, 0.0), axis=1), axis=0)
        )
    return inverses


@triton.jit
def _product_kernel(
    x,
    gate,
    scale,
    eps,
    weight,
    bias,
    out,
    x_row,
    gate_row,
    out_row,
    B: tl.constexpr,
    PADDED: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    HEAD: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    INPUT: tl.constexpr,
    OUTPUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    dtype = out.dtype.element_ty
    # Weights first: nothing before writes them.
    first = tl.program_id(0) * BLOCK_OUT
    outputs = first + tl.arange(0, BLOCK_OUT)
    if OUTPUT == SWIGLU:
        # A row of gate, the same one of up, and so on.
        row = tl.arange(0, 2 * BLOCK_OUT)
        output = first + row // 2
        row_mask = output < OUT
        row_at = weight + (output + row % 2 * OUT).to(tl.int64) * IN
    else:
        row_mask = outputs < OUT
        row_at = weight + outputs.to(tl.int64) * IN
    columns, mask = _columns(0, IN, BLOCK_IN, HEAD)
    tile = _weight_tile(row_at, row_mask, columns, mask)
    has_norm: tl.constexpr = (INPUT == NORM) | (INPUT == GATED_NORM)
    one = tl.full((), 1.0, tl.float32)
    epsilon = tl.load(eps) if has_norm else one
    factors = tl.load(scale + columns % HEAD, mask=mask, other=0.0) if has_norm else one
    if EARLY:
        gdc_wait()

    has_gate: tl.constexpr = (INPUT == GATED_NORM) | (INPUT == SIGMOID_GATE)
    numbers = _load_rows(x, x_row, columns, mask, B)
    gates = _load_rows(gate, gate_row, columns, mask, B) if has_gate else numbers
    lanes = tl.arange(0, PADDED)
    out_at = out + lanes[None, :] * out_row + outputs[:, None]
    out_mask = (outputs < OUT)[:, None] & (lanes < B)[None, :]
    if OUTPUT == ADD:
        residual = tl.load(out_at, mask=out_mask, other=0.0).to(tl.float32)
    inverses = ()
    sums = ()
    for _ in tl.static_range(B):
        inverses = _appended(inverses, one)
        sums = _appended(sums, tl.zeros((tile.shape[0], BLOCK_IN // _GROUP), tl.float32))
    if INPUT == NORM:
        inverses = _inverse_rms(numbers, x, x_row, epsilon, B, PADDED, IN, BLOCK_IN, CHUNKS)
    for chunk in range(1, CHUNKS):
        columns, mask = _columns(chunk, IN, BLOCK_IN, HEAD)
        # On their way while the chunk before is multiplied.
        next_tile = _weight_tile(row_at, row_mask, columns, mask)
        next_numbers = _load_rows(x, x_row, columns, mask, B)
        next_gates = _load_rows(gate, gate_row, columns, mask, B) if has_gate else next_numbers
        next_factors = (
            tl.load(scale + columns % HEAD, mask=mask, other=0.0) if has_norm else factors
        )
        sums = _multiply_add(sums, tile, factors, numbers, gates, inverses, epsilon, B, INPUT, HEAD)
        tile, factors, numbers, gates = next_tile, next_factors, next_numbers, next_gates
    sums = _multiply_add(sums, tile, factors, numbers, gates, inverses, epsilon, B, INPUT, HEAD)

    total = _total(sums, B, PADDED)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=outputs < OUT, other=0.0).to(tl.float32)[:, None]
    result = total.to(dtype)
    if OUTPUT == SWIGLU:
        pairs = tl.reshape(result, (BLOCK_OUT, 2, PADDED))
        opening, up = tl.split(tl.permute(pairs, (0, 2, 1)))
        opening = opening.to(tl.float32)
        opening = (opening * tl.sigmoid(opening)).to(dtype).to(tl.float32)
        result = (opening * up.to(tl.float32)).to(dtype)
    elif OUTPUT == ADD:
        result = (residual + result.to(tl.float32)).to(dtype)
    tl.store(out_at, result, mask=out_mask)
