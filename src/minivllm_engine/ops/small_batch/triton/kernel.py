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
def _weight_tile(
    row_at, row_mask, chunk, IN: tl.constexpr, BLOCK_IN: tl.constexpr, HEAD: tl.constexpr
):
    """Numbers [rows, BLOCK_IN] of the rows that begin at row_at."""
    columns, mask = _columns(chunk, IN, BLOCK_IN, HEAD)
    return tl.load(
        row_at[:, None] + columns[None, :],
        mask=row_mask[:, None] & mask[None, :],
        other=0.0,
        eviction_policy="evict_first",
    )


@triton.jit
def _inverse_rms(x, eps, IN: tl.constexpr, BLOCK_IN: tl.constexpr):
    """1 / rms of a row of x."""
    squares = tl.zeros((BLOCK_IN,), tl.float32)
    for chunk in range(triton.cdiv(IN, BLOCK_IN)):
        columns, mask = _columns(chunk, IN, BLOCK_IN, IN)
        numbers = tl.load(x + columns, mask=mask, other=0.0).to(tl.float32)
        squares += numbers * numbers
    return tl.rsqrt(tl.sum(squares, axis=0) / IN + eps)


@triton.jit
def _head_norm(numbers, eps, HEAD: tl.constexpr, BLOCK_IN: tl.constexpr):
    """Each head of a chunk over its rms."""
    block: tl.constexpr = triton.next_power_of_2(HEAD)
    heads = tl.reshape(numbers, (BLOCK_IN // block, block))
    inverse = tl.rsqrt(tl.sum(heads * heads, axis=1) / HEAD + eps)
    return tl.reshape(heads * inverse[:, None], (BLOCK_IN,))


@triton.jit
def _activations(
    x,
    gate,
    scale,
    inverse,
    eps,
    chunk,
    INPUT: tl.constexpr,
    IN: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    HEAD: tl.constexpr,
):
    """A chunk [BLOCK_IN] of a row that is multiplied: fp32, but rounded as if it had been stored."""
    columns, mask = _columns(chunk, IN, BLOCK_IN, HEAD)
    dtype = x.dtype.element_ty
    numbers = tl.load(x + columns, mask=mask, other=0.0).to(tl.float32)
    if INPUT == NORM:
        factors = tl.load(scale + columns, mask=mask, other=0.0)
        numbers = (numbers * inverse * factors).to(dtype).to(tl.float32)
    elif INPUT == GATED_NORM:
        gates = tl.load(gate + columns, mask=mask, other=0.0).to(tl.float32)
        weights = tl.load(scale + columns % HEAD, mask=mask, other=0.0)
        normed = _head_norm(numbers, eps, HEAD, BLOCK_IN).to(dtype).to(tl.float32)
        numbers = (gates * tl.sigmoid(gates) * weights * normed).to(dtype).to(tl.float32)
    elif INPUT == SIGMOID_GATE:
        gates = tl.load(gate + columns, mask=mask, other=0.0).to(tl.float32)
        gates = tl.sigmoid(gates).to(dtype).to(tl.float32)
        numbers = (numbers * gates).to(dtype).to(tl.float32)
    return numbers


@triton.jit
def _multiply_add(
    sums,
    tile,
    x,
    x_row,
    gate,
    gate_row,
    scale,
    inverses,
    eps,
    chunk,
    B: tl.constexpr,
    INPUT: tl.constexpr,
    IN: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    HEAD: tl.constexpr,
):
    """sums, for each row of x one [rows, groups], with the products of a tile added."""
    weights = tile.to(tl.float32)
    shape: tl.constexpr = (tile.shape[0], BLOCK_IN // _GROUP, _GROUP)
    new = ()
    for row in tl.static_range(B):
        numbers = _activations(
            x + row * x_row,
            gate + row * gate_row,
            scale,
            inverses[row],
            eps,
            chunk,
            INPUT,
            IN,
            BLOCK_IN,
            HEAD,
        )
        products = tl.reshape(weights * numbers[None, :], shape)
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
    tile = _weight_tile(row_at, row_mask, 0, IN, BLOCK_IN, HEAD)
    has_norm: tl.constexpr = (INPUT == NORM) | (INPUT == GATED_NORM)
    epsilon = tl.load(eps) if has_norm else 0.0
    if EARLY:
        gdc_wait()

    lanes = tl.arange(0, PADDED)
    out_at = out + lanes[None, :] * out_row + outputs[:, None]
    out_mask = (outputs < OUT)[:, None] & (lanes < B)[None, :]
    if OUTPUT == ADD:
        residual = tl.load(out_at, mask=out_mask, other=0.0).to(tl.float32)
    inverses = ()
    sums = ()
    for row in tl.static_range(B):
        at = x + row * x_row
        inverse = _inverse_rms(at, epsilon, IN, BLOCK_IN) if INPUT == NORM else 1.0
        inverses = _appended(inverses, inverse)
        sums = _appended(sums, tl.zeros((tile.shape[0], BLOCK_IN // _GROUP), tl.float32))
    for chunk in range(1, CHUNKS):
        following = _weight_tile(row_at, row_mask, chunk, IN, BLOCK_IN, HEAD)
        sums = _multiply_add(
            sums, tile, x, x_row, gate, gate_row, scale, inverses, epsilon, chunk - 1,
            B, INPUT, IN, BLOCK_IN, HEAD,
        )  # fmt: skip
        tile = following
    sums = _multiply_add(
        sums, tile, x, x_row, gate, gate_row, scale, inverses, epsilon, CHUNKS - 1,
        B, INPUT, IN, BLOCK_IN, HEAD,
    )  # fmt: skip

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
