"""Grouped products of the expert MLPs: persistent grids over a schedule read on the device.

Rows are sorted by expert. A tile is 128 rows (or one half of them) of one expert times a block of
columns; tiles run expert by expert, ``GROUP`` row tiles together, so that an expert's weights and
rows stay in the L2 cache. Weights come through tensor descriptors, which zero-fill past the edges
of an expert; gathered rows come through pointers.
"""

import triton
import triton.language as tl

from slipstream.ops.activation.kernels import ALL, gate_function

TILE_ROWS = tl.constexpr(128)


@triton.jit
def entry_of(tile, num_m, num_n, schedule_ptr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Expert, first row and column block of a tile; the last tile's for one past it."""
    PARTS: tl.constexpr = TILE_ROWS // BLOCK_M
    tile = tl.maximum(tl.minimum(tile, num_m * num_n - 1), 0)
    width = GROUP * num_n
    first = (tile // width) * GROUP
    size = tl.maximum(tl.minimum(num_m - first, GROUP), 1)
    m = first + (tile % width) % size
    n = (tile % width) // size
    entry = schedule_ptr + 2 * (1 + m // PARTS)
    # Without any tile there is no first entry either.
    there = num_m > 0
    row = tl.load(entry + 1, mask=there, other=0) + (m % PARTS) * BLOCK_M
    return tl.load(entry, mask=there, other=0), row, n


@triton.jit
def locate(
    tile, num_m, num_n, schedule_ptr, offsets_ptr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Expert, first row, end of the expert's rows and column block of a tile."""
    expert, row, n = entry_of(tile, num_m, num_n, schedule_ptr, GROUP, BLOCK_M)
    return expert, row, tl.load(offsets_ptr + expert + 1), n


@triton.jit
def slots_from(order_ptr, row, present, GATHER: tl.constexpr, BLOCK_M: tl.constexpr):
    """Slots of a tile's rows, of other experts too; the rows themselves if nothing is gathered."""
    rows = row + tl.arange(0, BLOCK_M)
    if GATHER:
        return tl.load(order_ptr + rows, mask=rows < present, other=0)
    else:
        return rows


@triton.jit
def length_of(row, end, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr):
    """How far a tile contracts: not at all where only the other part of 128 rows is there."""
    if BLOCK_M == TILE_ROWS:
        return WIDTH
    else:
        return tl.where(row < end, WIDTH, 0)


@triton.jit
def gated_halves(block, INTERLEAVED: tl.constexpr):
    """Gate and up columns of a block that holds both."""
    HALF: tl.constexpr = block.shape[1] // 2
    if INTERLEAVED:
        pairs = tl.reshape(block, (block.shape[0], HALF, 2))
    else:
        pairs = tl.permute(tl.reshape(block, (block.shape[0], 2, HALF)), (0, 2, 1))
    return tl.split(pairs)


@triton.jit
def activate(gate, up, alpha, limit, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """Activation of an MLP in fp32; ``up`` is not looked at where there is no gate."""
    if ACTIVATION == "clamped" or ACTIVATION == "clamped_16_bit":
        gate = tl.minimum(gate, limit, propagate_nan=ALL)
        up = tl.maximum(tl.minimum(up, limit, propagate_nan=ALL), -limit, propagate_nan=ALL) + 1
    value, _ = gate_function(gate, alpha, ACTIVATION)
    if GATED:
        value = value * up
    return value


@triton.jit
def weight_block(
    w_desc,
    expert,
    n,
    k,
    SPLIT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Columns of an expert's weights as (BLOCK_K, BLOCK_N).

    ``SPLIT``: the descriptor sees gate and up as a dimension of their own and a block takes both.
    """
    if TRANSPOSED and SPLIT:
        block = tl.reshape(w_desc.load([expert, k, 0, n]), (BLOCK_K, BLOCK_N))
    elif TRANSPOSED:
        block = tl.reshape(w_desc.load([expert, k, n]), (BLOCK_K, BLOCK_N))
    elif SPLIT:
        block = tl.reshape(w_desc.load([expert, 0, n, k]), (BLOCK_N, BLOCK_K)).T
    else:
        block = tl.reshape(w_desc.load([expert, n, k]), (BLOCK_N, BLOCK_K)).T
    return block


@triton.jit
def row_block(
    x_ptr, x_desc, tokens, row, k, WIDTH: tl.constexpr, GATHER: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Columns ``k : k + BLOCK_K`` of the tile's rows, zeros past ``WIDTH``."""
    columns = k + tl.arange(0, BLOCK_K)
    if not GATHER:
        block = x_desc.load([row, k])
    elif WIDTH % BLOCK_K == 0:
        block = tl.load(x_ptr + tokens[:, None] * WIDTH + columns[None, :])
    else:
        inside = (columns < WIDTH)[None, :]
        block = tl.load(x_ptr + tokens[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)
    return block


@triton.jit
def add_product(acc, x, w, PRECISION: tl.constexpr):
    """``acc + x w``; fp32 in full adds up by blocks, as cuBLAS does: long chains round more."""
    if PRECISION == "ieee" and x.dtype == tl.float32:
        # The number keeps the compiler from adding up in ``acc`` after all.
        return acc + tl.dot(x, w, input_precision=PRECISION, max_num_imprecise_acc=2**30)
    else:
        return tl.dot(x, w, acc, input_precision=PRECISION)


@triton.jit
def column_halves(block):
    """The left and the right half of a block; nothing moves between threads."""
    HALF: tl.constexpr = block.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(block, (block.shape[0], 2, HALF)), (0, 2, 1)))


@triton.jit
def moe_up_kernel(
    x_ptr, x_desc, w_desc, bias_ptr, h_ptr, a_ptr, order_ptr, offsets_ptr, schedule_ptr,
    alpha, limit,
    E: tl.constexpr, TOP_K: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    GATHER: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """``h = x w13^T + b13`` (N, gate then up) and ``a = activation(h)`` (N, F); either may be None.

    ``BLOCK_N`` columns of h make ``BLOCK_N / 2`` of a gated activation. What leads to the rows of
    a tile, its entry and then its slots, is loaded two tiles and one tile ahead.
    """
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    SPLIT: tl.constexpr = GATED and not INTERLEAVED
    num_n: tl.constexpr = (F + WIDTH - 1) // WIDTH
    num_m = tl.load(schedule_ptr) * (TILE_ROWS // BLOCK_M)
    present = tl.load(offsets_ptr + E)
    start, step = tl.program_id(0), tl.num_programs(0)
    expert_1, row_1, n_1 = entry_of(start, num_m, num_n, schedule_ptr, GROUP, BLOCK_M)
    expert_2, row_2, n_2 = entry_of(start + step, num_m, num_n, schedule_ptr, GROUP, BLOCK_M)
    slots_1 = slots_from(order_ptr, row_1, present, GATHER, BLOCK_M)
    for tile in tl.range(start, num_m * num_n, step):
        expert, row, n, slots = expert_1, row_1, n_1, slots_1
        expert_1, row_1, n_1 = expert_2, row_2, n_2
        slots_1 = slots_from(order_ptr, row_1, present, GATHER, BLOCK_M)
        expert_2, row_2, n_2 = entry_of(tile + 2 * step, num_m, num_n, schedule_ptr, GROUP, BLOCK_M)
        end = tl.load(offsets_ptr + expert + 1)
        rows = row + tl.arange(0, BLOCK_M)
        here = rows < end
        tokens = slots // TOP_K if GATHER else rows
        first = n * WIDTH if SPLIT or not GATED else n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, length_of(row, end, D, BLOCK_M), BLOCK_K, num_stages=STAGES):
            x = row_block(x_ptr, x_desc, tokens, row, k, D, GATHER, BLOCK_K)
            w = weight_block(w_desc, expert, first, k, SPLIT, TRANSPOSED, BLOCK_N, BLOCK_K)
            acc = add_product(acc, x, w, PRECISION)
        columns = n * WIDTH + tl.arange(0, WIDTH)
        inside = here[:, None] & (columns < F)[None, :]
        wide_rows = rows.to(tl.int64)[:, None]
        if GATED:
            gate, up = gated_halves(acc, INTERLEAVED)
        else:
            gate, up = acc, acc
        if bias_ptr is not None:
            STEP: tl.constexpr = 2 if INTERLEAVED else 1
            SECOND: tl.constexpr = 1 if INTERLEAVED else F
            bias = bias_ptr + expert.to(tl.int64) * (2 * F if GATED else F) + columns * STEP
            gate += tl.load(bias, mask=columns < F, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(bias + SECOND, mask=columns < F, other=0.0).to(tl.float32)[None, :]
        # The activation sees h as it is stored, so that backward works on the same numbers.
        dtype = x_ptr.dtype.element_ty
        gate, up = gate.to(dtype), up.to(dtype)
        if h_ptr is not None:
            h = h_ptr + wide_rows * (2 * F if GATED else F) + columns[None, :]
            tl.store(h, gate, mask=inside)
            if GATED:
                tl.store(h + F, up, mask=inside)
        if a_ptr is not None:
            a = activate(gate.to(tl.float32), up.to(tl.float32), alpha, limit, ACTIVATION, GATED)
            tl.store(a_ptr + wide_rows * F + columns[None, :], a.to(dtype), mask=inside)


@triton.jit
def moe_rows_kernel(
    x_ptr, x_desc, w_desc, bias_ptr, out_ptr, order_ptr, offsets_ptr, schedule_ptr,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr,
    TRANSPOSED: tl.constexpr, GATHER: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """``out[r] = x[r] w[e]^T (+ bias[e])``: rows (N, WIDTH) of each expert times its weights.

    Weights (E, OUT, WIDTH), or (E, WIDTH, OUT) where ``TRANSPOSED``.
    """
    num_n: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    num_m = tl.load(schedule_ptr) * (TILE_ROWS // BLOCK_M)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        expert, row, end, n = locate(tile, num_m, num_n, schedule_ptr, offsets_ptr, GROUP, BLOCK_M)
        rows = row + tl.arange(0, BLOCK_M)
        here = rows < end
        tokens = rows
        if GATHER:
            tokens = tl.load(order_ptr + rows, mask=here, other=0) // TOP_K
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, length_of(row, end, WIDTH, BLOCK_M), BLOCK_K, num_stages=STAGES):
            x = row_block(x_ptr, x_desc, tokens, row, k, WIDTH, GATHER, BLOCK_K)
            w = weight_block(w_desc, expert, n * BLOCK_N, k, False, TRANSPOSED, BLOCK_N, BLOCK_K)
            acc = add_product(acc, x, w, PRECISION)
        columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
        if bias_ptr is not None:
            bias = bias_ptr + expert.to(tl.int64) * OUT + columns
            acc += tl.load(bias, mask=columns < OUT, other=0.0).to(tl.float32)[None, :]
        out = out_ptr + rows.to(tl.int64)[:, None] * OUT + columns[None, :]
        tl.store(out, acc.to(x_ptr.dtype.element_ty), mask=here[:, None] & (columns < OUT)[None, :])


@triton.jit(do_not_specialize=["num_entries"])
def moe_schedule_kernel(
    offsets_ptr, schedule_ptr, num_entries, E: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The schedule of ``Routing``; one program writes what concerns one expert."""
    expert = tl.program_id(0)
    others = tl.arange(0, BLOCK_E)
    start = tl.load(offsets_ptr + others, mask=others < E, other=0)
    rows = tl.load(offsets_ptr + others + 1, mask=others < E, other=0) - start
    tiles = tl.cdiv(rows, TILE_ROWS)
    row = tl.load(offsets_ptr + expert)
    own = tl.load(offsets_ptr + expert + 1) - row
    before = (others < E) & ((rows > own) | ((rows == own) & (others < expert)))
    first = tl.sum(tl.where(before, tiles, 0))
    rank = tl.sum(before.to(tl.int32))
    last = schedule_ptr + 2 * (1 + num_entries + rank)
    tl.store(last, expert)
    tl.store(last + 1, own)
    if expert == 0:
        tl.store(schedule_ptr, tl.sum(tiles))
        tl.store(schedule_ptr + 1, 0)
    num_tiles = tl.cdiv(own, TILE_ROWS)
    for i in range(0, num_tiles, BLOCK):
        tile = i + tl.arange(0, BLOCK)
        entry = schedule_ptr + 2 * (1 + first + tile)
        tl.store(entry, tl.zeros((BLOCK,), tl.int32) + expert, mask=tile < num_tiles)
        tl.store(entry + 1, row + tile * TILE_ROWS, mask=tile < num_tiles)
