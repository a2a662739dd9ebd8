"""Backward of the expert MLPs: activation, weight gradients, bias gradients.

Products over rows are ``moe_rows_kernel``; ``moe_da_kernel`` fuses the activation with one of them.
In ``moe_outer_kernel`` a token dimension of any length is contracted per expert; an expert without
rows gets zeros. Nothing is added atomically.
"""

import triton
import triton.language as tl

from slipstream.ops.activation.kernels import ALL, gate_function
from slipstream.ops.moe.experts.kernels import (
    TILE_ROWS,
    add_product,
    column_halves,
    length_of,
    locate,
    weight_block,
)


@triton.jit
def activation_gradients(
    da, gate, up, alpha, limit, weight, ACTIVATION: tl.constexpr, GATED: tl.constexpr
):
    """The activation of fp32 (gate, up), and gradients of both from ``weight * da``."""
    flows = gate <= limit
    if ACTIVATION == "clamped" or ACTIVATION == "clamped_16_bit":
        gate = tl.minimum(gate, limit, propagate_nan=ALL)
    value, slope = gate_function(gate, alpha, ACTIVATION)
    grad = da * weight
    if GATED:
        dup = grad * value
        if ACTIVATION == "clamped" or ACTIVATION == "clamped_16_bit":
            dup = tl.where((up >= -limit) & (up <= limit), dup, 0.0)
            slope = tl.where(flows, slope, 0.0)
            up = tl.maximum(tl.minimum(up, limit, propagate_nan=ALL), -limit, propagate_nan=ALL) + 1
        a = value * up
        dgate = grad * up * slope
    else:
        a = value
        dgate = grad * slope
        dup = dgate
    return a, dgate, dup


@triton.jit(do_not_specialize=["num_rows"])
def moe_activation_bwd_kernel(
    da_ptr, h_ptr, weight_ptr, order_ptr, offsets_ptr, dh_ptr, aw_ptr, dweight_ptr, num_rows,
    alpha, limit,
    E: tl.constexpr, F: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Rows of ``dh``, of the weighted activation ``aw`` and of ``dweight = sum(da * a)``.

    ``da`` is the gradient of the activation before the row's weight. ``weight_ptr`` and
    ``dweight_ptr`` are in slot order, or None for rows without weights. A slot of no expert gets
    a zero ``dweight``.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = rows < num_rows
    present = valid & (rows < tl.load(offsets_ptr + E))
    P: tl.constexpr = 2 * F if GATED else F
    dtype = da_ptr.dtype.element_ty
    slots, weight = rows, 1.0
    if weight_ptr is not None:
        slots = tl.load(order_ptr + rows, mask=valid, other=0)
        weight = tl.load(weight_ptr + slots, mask=valid, other=0.0)[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    for f in tl.range(0, F, BLOCK_F):
        columns = f + tl.arange(0, BLOCK_F)
        inside = present[:, None] & (columns < F)[None, :]
        at_row = rows[:, None] * F + columns[None, :]
        at_gate = rows[:, None] * P + columns[None, :]
        da = tl.load(da_ptr + at_row, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(h_ptr + at_gate, mask=inside, other=0.0).to(tl.float32)
        up = gate
        if GATED:
            up = tl.load(h_ptr + at_gate + F, mask=inside, other=0.0).to(tl.float32)
        a, dgate, dup = activation_gradients(da, gate, up, alpha, limit, weight, ACTIVATION, GATED)
        if GATED and INTERLEAVED:
            pair = tl.interleave(dgate.to(dtype), dup.to(dtype))
            wide = 2 * f + tl.arange(0, 2 * BLOCK_F)
            here = present[:, None] & (wide < P)[None, :]
            tl.store(dh_ptr + rows[:, None] * P + wide[None, :], pair, mask=here)
        else:
            tl.store(dh_ptr + at_gate, dgate.to(dtype), mask=inside)
            if GATED:
                tl.store(dh_ptr + at_gate + F, dup.to(dtype), mask=inside)
        total += da * a
        tl.store(aw_ptr + at_row, (a * weight).to(dtype), mask=inside)
    if dweight_ptr is not None:
        tl.store(dweight_ptr + slots, tl.sum(total, 1), mask=valid)


@triton.jit
def finish_columns(
    da, h_ptr, dh_ptr, aw_ptr, rows, here, weight, first, alpha, limit,
    F: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """What follows the product for some of its columns; returns ``sum(da * a)`` of each row."""
    P: tl.constexpr = 2 * F if GATED else F
    dtype = h_ptr.dtype.element_ty
    columns = first + tl.arange(0, da.shape[1])
    inside = here[:, None] & (columns < F)[None, :]
    at_gate = rows[:, None] * P + columns[None, :]
    gate = tl.load(h_ptr + at_gate, mask=inside, other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(h_ptr + at_gate + F, mask=inside, other=0.0).to(tl.float32)
    a, dgate, dup = activation_gradients(da, gate, up, alpha, limit, weight, ACTIVATION, GATED)
    tl.store(dh_ptr + at_gate, dgate.to(dtype), mask=inside)
    if GATED:
        tl.store(dh_ptr + at_gate + F, dup.to(dtype), mask=inside)
    tl.store(aw_ptr + rows[:, None] * F + columns[None, :], (a * weight).to(dtype), mask=inside)
    return tl.sum(da * a, 1)


@triton.jit
def moe_da_kernel(
    dout_desc, w2_desc, h_ptr, weight_ptr, dh_ptr, aw_ptr, partial_ptr,
    order_ptr, offsets_ptr, schedule_ptr, alpha, limit,
    D: tl.constexpr, F: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """``da = dout w2`` and, before it leaves the registers, all that the activation makes of it.

    As ``moe_activation_bwd_kernel``, but the sums for ``dweight`` are of a block of columns each:
    ``partial_ptr (slots, blocks)``, or None for rows without weights. The epilogue takes a quarter
    of the columns at a time; all at once would not fit the registers.
    """
    num_n: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    num_m = tl.load(schedule_ptr) * (TILE_ROWS // BLOCK_M)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        expert, row, end, n = locate(tile, num_m, num_n, schedule_ptr, offsets_ptr, GROUP, BLOCK_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, length_of(row, end, D, BLOCK_M), BLOCK_K, num_stages=STAGES):
            dout = dout_desc.load([row, k])
            w = weight_block(w2_desc, expert, n * BLOCK_N, k, False, TRANSPOSED, BLOCK_N, BLOCK_K)
            acc = add_product(acc, dout, w, PRECISION)
        # Widened last: 64-bit sums of rows cost forty registers here.
        rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
        here = rows < end
        slots, weight = rows, tl.full((BLOCK_M, 1), 1.0, tl.float32)
        if weight_ptr is not None:
            slots = tl.load(order_ptr + rows, mask=here, other=0)
            weight = tl.load(weight_ptr + slots, mask=here, other=0.0)[:, None]
        left, right = column_halves(acc)
        first, second = column_halves(left)
        third, fourth = column_halves(right)
        QUARTER: tl.constexpr = BLOCK_N // 4
        total = finish_columns(
            first, h_ptr, dh_ptr, aw_ptr, rows, here, weight,
            n * BLOCK_N, alpha, limit, F, ACTIVATION, GATED,
        )  # fmt: skip
        total += finish_columns(
            second, h_ptr, dh_ptr, aw_ptr, rows, here, weight,
            n * BLOCK_N + QUARTER, alpha, limit, F, ACTIVATION, GATED,
        )  # fmt: skip
        total += finish_columns(
            third, h_ptr, dh_ptr, aw_ptr, rows, here, weight,
            n * BLOCK_N + 2 * QUARTER, alpha, limit, F, ACTIVATION, GATED,
        )  # fmt: skip
        total += finish_columns(
            fourth, h_ptr, dh_ptr, aw_ptr, rows, here, weight,
            n * BLOCK_N + 3 * QUARTER, alpha, limit, F, ACTIVATION, GATED,
        )  # fmt: skip
        if partial_ptr is not None:
            tl.store(partial_ptr + slots * num_n + n, total, mask=here)


@triton.jit
def moe_tails_kernel(
    left_ptr, right_ptr, offsets_ptr, num_rows,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The last, partial block of each expert's rows again behind all rows, filled with zeros.

    Of both operands of ``moe_outer_kernel``; an expert without rows gets a block of zeros.
    """
    expert = tl.program_id(0)
    block = tl.program_id(1)
    start = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    full = start + (end - start) // BLOCK_K * BLOCK_K
    if full < end or start == end:
        lane = tl.arange(0, BLOCK_K)
        here = full + lane < end
        source = (full + lane).to(tl.int64)
        target = (num_rows + expert * BLOCK_K + lane).to(tl.int64)
        of_left: tl.constexpr = (LEFT + BLOCK - 1) // BLOCK
        if block < of_left:
            copy_rows(left_ptr, source, target, here, block, LEFT, BLOCK)
        else:
            copy_rows(right_ptr, source, target, here, block - of_left, RIGHT, BLOCK)


@triton.jit
def copy_rows(ptr, source, target, here, block, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows ``source`` to rows ``target``, zeros where they are not ``here``."""
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = (columns < WIDTH)[None, :]
    rows = tl.load(
        ptr + source[:, None] * WIDTH + columns[None, :], mask=inside & here[:, None], other=0.0
    )
    tl.store(ptr + target[:, None] * WIDTH + columns[None, :], rows, mask=inside)


@triton.jit
def part_block(source_ptr, rows, here, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of which some are there, zeros for the others."""
    columns = column + tl.arange(0, BLOCK)
    inside = (columns < WIDTH)[None, :] & here[:, None]
    return tl.load(source_ptr + rows[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)


@triton.jit
def write_columns(
    block, out_ptr, out_desc, expert, row, column,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Columns of an expert's weight gradient: stored, or added to what is there."""
    if out_desc is not None:
        block = tl.reshape(block, (1, block.shape[0], block.shape[1]))
        out_desc.store([expert, row, column], block.to(out_ptr.dtype.element_ty))
    else:
        rows = row + tl.arange(0, block.shape[0])
        columns = column + tl.arange(0, block.shape[1])
        out = out_ptr + (expert.to(tl.int64) * LEFT + rows[:, None]) * RIGHT + columns[None, :]
        inside = (rows < LEFT)[:, None] & (columns < RIGHT)[None, :]
        if ACCUMULATE:
            block += tl.load(out, mask=inside, other=0.0).to(tl.float32)
        tl.store(out, block.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_entries", "num_rows"])
def moe_outer_kernel(
    left_ptr, left_desc, right_ptr, right_desc, out_ptr, out_desc, offsets_ptr, schedule_ptr,
    num_entries, num_rows,
    E: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, TAILS: tl.constexpr,
    ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """``out[e] = left[rows of e]^T right[rows of e]`` (E, LEFT, RIGHT), added where ``ACCUMULATE``.

    ``TAILS``: ``moe_tails_kernel`` has run, so the last, partial block of an expert is a load like
    all others, and the loops over tiles and blocks are one: the next tile's loads run during the
    end of this one. Else that block is masked, after the loop.
    """
    num_m: tl.constexpr = (LEFT + BLOCK_M - 1) // BLOCK_M
    num_n: tl.constexpr = (RIGHT + BLOCK_N - 1) // BLOCK_N
    tiles: tl.constexpr = num_m * num_n
    for index in tl.range(tl.program_id(0), E * tiles, tl.num_programs(0), flatten=TAILS):
        # The experts in order of size stand behind the tiles' entries.
        expert = tl.load(schedule_ptr + 2 * (1 + num_entries + index // tiles))
        tile = index % tiles
        first = (tile // (GROUP * num_n)) * GROUP
        size = tl.minimum(num_m - first, GROUP)
        m = (first + (tile % (GROUP * num_n)) % size) * BLOCK_M
        n = ((tile % (GROUP * num_n)) // size) * BLOCK_N
        start = tl.load(offsets_ptr + expert)
        end = tl.load(offsets_ptr + expert + 1)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if TAILS:
            blocks = tl.maximum((end - start + BLOCK_K - 1) // BLOCK_K, 1)
            # One loop needs a block in each tile; the compiler does not see it in the line above.
            tl.assume(blocks > 0)
        else:
            blocks = (end - start) // BLOCK_K
        for block in tl.range(0, blocks, num_stages=STAGES):
            row = start + block * BLOCK_K
            if TAILS:
                row = tl.where(row + BLOCK_K <= end, row, num_rows + expert * BLOCK_K)
            left = left_desc.load([row, m])
            right = right_desc.load([row, n])
            acc = add_product(acc, left.T, right, PRECISION)
        if not TAILS:
            full = start + blocks * BLOCK_K
            if full < end:
                lane = tl.arange(0, BLOCK_K)
                rows, here = (full + lane).to(tl.int64), full + lane < end
                left = part_block(left_ptr, rows, here, m, LEFT, BLOCK_M)
                right = part_block(right_ptr, rows, here, n, RIGHT, BLOCK_N)
                acc = add_product(acc, left.T, right, PRECISION)
        # In parts, which need less shared memory, or registers, than all columns at once.
        one, two = column_halves(acc)
        HALF: tl.constexpr = BLOCK_N // 2
        if out_ptr.dtype.element_ty == tl.float32:
            a, b = column_halves(one)
            c, d = column_halves(two)
            QUARTER: tl.constexpr = BLOCK_N // 4
            write_columns(a, out_ptr, out_desc, expert, m, n, LEFT, RIGHT, ACCUMULATE)
            write_columns(b, out_ptr, out_desc, expert, m, n + QUARTER, LEFT, RIGHT, ACCUMULATE)
            write_columns(c, out_ptr, out_desc, expert, m, n + HALF, LEFT, RIGHT, ACCUMULATE)
            last = n + HALF + QUARTER
            write_columns(d, out_ptr, out_desc, expert, m, last, LEFT, RIGHT, ACCUMULATE)
        else:
            write_columns(one, out_ptr, out_desc, expert, m, n, LEFT, RIGHT, ACCUMULATE)
            write_columns(two, out_ptr, out_desc, expert, m, n + HALF, LEFT, RIGHT, ACCUMULATE)


@triton.jit
def moe_row_sum_kernel(
    x_ptr, out_ptr, offsets_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):
    """``out[e] = sum of the rows of e``, fp32 (E, WIDTH), in row order: the gradient of a bias."""
    expert = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    total = tl.zeros((BLOCK_K, BLOCK), tl.float32)
    for row in tl.range(start, end, BLOCK_K):
        rows = row + tl.arange(0, BLOCK_K)
        inside = (rows < end)[:, None] & (columns < WIDTH)[None, :]
        pointers = x_ptr + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        total += tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    out = out_ptr + expert.to(tl.int64) * WIDTH + columns
    tl.store(out, tl.sum(total, 0), mask=columns < WIDTH)
