"""Slots sorted by expert without a sort: counts per tile, a prefix over tiles, ranks in a tile.

A tile is a run of tokens. The row of a slot is the first row of its expert, plus the slots that
expert has in earlier tiles, plus its earlier slots in this tile (a prefix over the tile's tokens):
stable by construction.
"""

import triton
import triton.language as tl

TILE_ROWS = tl.constexpr(128)
"""Rows of an expert that one tile of the schedule covers."""


@triton.jit
def bins_of(expert, E: tl.constexpr):
    """Experts as int32; whatever is no expert falls in bin E."""
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit(do_not_specialize=["N", "num_tiles"])
def moe_count_kernel(
    expert_ptr, count_ptr, N, num_tiles,
    E: tl.constexpr, TILE_N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """``count[e, tile]``, bin E: slots of no expert."""
    tile = tl.program_id(0)
    local = tl.arange(0, BLOCK_N)
    slot = tile.to(tl.int64) * TILE_N + local
    inside = (local < TILE_N) & (slot < N)
    bins = bins_of(tl.load(expert_ptr + slot, mask=inside, other=E), E)
    count_E = tl.histogram(bins, BLOCK_E, mask=inside)
    e = tl.arange(0, BLOCK_E)
    tl.store(count_ptr + e.to(tl.int64) * num_tiles + tile, count_E, mask=e <= E)


@triton.jit(do_not_specialize=["T", "length", "tiles_per_sequence", "num_tiles"])
def moe_prefix_kernel(
    count_ptr, plain_ptr, prob_ptr, global_ptr, square_ptr, state_ptr,
    base_ptr, total_ptr, demand_ptr, share_ptr, part_ptr, z_ptr, rerouted_ptr,
    T, length, tiles_per_sequence, num_tiles,
    BINS: tl.constexpr, TOP_K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per (bin, sequence): slots before each tile, and the sequence's loss terms.

    ``base[tile, bin]``; ``share[s, e]`` of plain top-k (``global_ptr`` replaces it in the loss);
    ``part[s, e] = share * mean score``. One program of bin BINS sums what is per token. Sums of
    floats over tiles are fp64. ``plain_ptr``: counts of plain top-k, written only if
    ``state_ptr``, the number of slots that load balancing moved, is not 0.
    """
    moved = tl.zeros((), tl.int64)
    if state_ptr is not None:
        moved = tl.load(state_ptr)
    e, sequence = tl.program_id(0) % (BINS + 1), tl.program_id(0) // (BINS + 1)
    first = sequence * tiles_per_sequence
    end = first + tiles_per_sequence
    column = e.to(tl.int64) * num_tiles
    if e < BINS:
        running = tl.zeros((), tl.int32)
        asked = tl.zeros((), tl.int32)
        for start in range(0, first, CHUNK):
            tile = start + tl.arange(0, CHUNK)
            running += tl.sum(tl.load(count_ptr + column + tile, mask=tile < first, other=0), 0)
            if plain_ptr is not None:
                asking = (tile < first) & (moved > 0)
                asked += tl.sum(tl.load(plain_ptr + column + tile, mask=asking, other=0), 0)
        before = tl.where(moved > 0, asked, running)
        prob = tl.zeros((), tl.float64)
        for start in range(first, end, CHUNK):
            tile = start + tl.arange(0, CHUNK)
            count = tl.load(count_ptr + column + tile, mask=tile < end, other=0)
            base = running + tl.cumsum(count, 0) - count
            tl.store(base_ptr + tile.to(tl.int64) * BINS + e, base, mask=tile < end)
            running += tl.sum(count, 0)
            if plain_ptr is not None:
                asking = (tile < end) & (moved > 0)
                asked += tl.sum(tl.load(plain_ptr + column + tile, mask=asking, other=0), 0)
            if prob_ptr is not None:
                part = tl.load(prob_ptr + column + tile, mask=tile < end, other=0.0)
                prob += tl.sum(part.to(tl.float64), 0)
        demand = tl.where(moved > 0, asked, running)
        if end == num_tiles:
            tl.store(total_ptr + e, running)
            if demand_ptr is not None:
                tl.store(demand_ptr + e, demand.to(tl.int64))
        if prob_ptr is not None:
            tokens = tl.maximum(length, 1).to(tl.float64)
            share = ((demand - before).to(tl.float64) / (tokens * TOP_K)).to(tl.float32)
            if global_ptr is not None:
                share = tl.load(global_ptr + e)
            else:
                tl.store(share_ptr + sequence * BINS + e, share)
            tl.store(part_ptr + sequence * BINS + e, share.to(tl.float64) * prob / tokens)
    elif sequence == 0:
        square = tl.zeros((), tl.float64)
        for start in range(0, num_tiles, CHUNK):
            tile = start + tl.arange(0, CHUNK)
            if square_ptr is not None:
                part = tl.load(square_ptr + tile, mask=tile < num_tiles, other=0.0)
                square += tl.sum(part.to(tl.float64), 0)
        tl.store(z_ptr, (square / tl.maximum(T, 1).to(tl.float64)).to(tl.float32))
        tl.store(rerouted_ptr, moved)


@triton.jit
def _write_maps(
    expert_ptr, base_ptr, total_ptr, order_ptr, position_ptr, start, end, tile,
    E: tl.constexpr, BINS: tl.constexpr, TOP_K: tl.constexpr, TILE_T: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    k, b = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_B)
    total_B = tl.load(total_ptr + b, mask=b < E, other=0)
    base_B = tl.load(base_ptr + tile.to(tl.int64) * BINS + b, mask=b < BINS, other=0)
    next_B = tl.cumsum(total_B, 0) - total_B + base_B
    for first in range(0, TILE_T, BLOCK_T):
        t = start + first + tl.arange(0, BLOCK_T)
        slot_TK = t[:, None] * TOP_K + k[None, :]
        inside_TK = (t < end)[:, None] & (k < TOP_K)[None, :]
        # Slots outside may be counted as of bin E: they come after all others.
        bins_TK = bins_of(tl.load(expert_ptr + slot_TK, mask=inside_TK, other=E), E)
        count_TB = tl.zeros((BLOCK_T, BLOCK_B), tl.int32)
        earlier_TK = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
        for slot in range(TOP_K):
            bins_T = tl.sum(tl.where((k == slot)[None, :], bins_TK, 0), axis=1)
            count_TB += (bins_T[:, None] == b[None, :]).to(tl.int32)
            same_TK = (bins_T[:, None] == bins_TK) & (k > slot)[None, :]
            earlier_TK += same_TK.to(tl.int32)
        row_TB = next_B[None, :] + tl.cumsum(count_TB, 0) - count_TB
        position_TK = tl.gather(row_TB, tl.minimum(bins_TK, BLOCK_B - 1), 1) + earlier_TK
        tl.store(position_ptr + slot_TK, position_TK.to(tl.int64), mask=inside_TK)
        tl.store(order_ptr + position_TK, slot_TK, mask=inside_TK)
        next_B += tl.sum(count_TB, axis=0)


@triton.jit
def _write_expert(
    total_ptr, offsets_ptr, schedule_ptr, e, spare,
    E: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    # Each expert finds its own place: how many experts, and how many tiles, come before it.
    other = tl.arange(0, BLOCK_E)
    rows_E = tl.load(total_ptr + other, mask=other < E, other=0)
    rows = tl.load(total_ptr + e)
    tiles_E = (rows_E + TILE_ROWS - 1) // TILE_ROWS
    ahead = ((rows_E > rows) | ((rows_E == rows) & (other < e))) & (other < E)
    rank = tl.sum(ahead.to(tl.int32), 0)
    place = 1 + tl.sum(tl.where(ahead, tiles_E, 0), 0)
    offset = tl.sum(tl.where(other < e, rows_E, 0), 0)
    tl.store(offsets_ptr + e + 1, offset + rows)
    if e == 0:
        tl.store(offsets_ptr, 0)
        tl.store(schedule_ptr, tl.sum(tiles_E, 0))
        tl.store(schedule_ptr + 1, 0)
    last = schedule_ptr + 2 * (1 + spare + rank).to(tl.int64)
    tl.store(last, e)
    tl.store(last + 1, rows)
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    for start in range(0, tiles, CHUNK):
        i = start + tl.arange(0, CHUNK)
        entry = schedule_ptr + 2 * (place + i).to(tl.int64)
        tl.store(entry, tl.zeros((CHUNK,), tl.int32) + e, mask=i < tiles)
        tl.store(entry + 1, offset + i * TILE_ROWS, mask=i < tiles)


@triton.jit(
    do_not_specialize=[
        "length",
        "tiles_per_sequence",
        "num_tiles",
        "spare",
        "sequences",
    ]
)
def moe_maps_kernel(
    expert_ptr, base_ptr, total_ptr, part_ptr, order_ptr, position_ptr, offsets_ptr,
    schedule_ptr, aux_ptr, length, tiles_per_sequence, num_tiles, spare, sequences,
    E: tl.constexpr, BINS: tl.constexpr, TOP_K: tl.constexpr, TILE_T: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Programs below E: one expert's offset and schedule (the first sums the balance loss).

    The others: one tile's slots to rows and rows to slots. ``spare``: room for tiles in the
    schedule, the M of ``Routing.schedule``.
    """
    program = tl.program_id(0)
    if program < E:
        _write_expert(total_ptr, offsets_ptr, schedule_ptr, program, spare, E, BLOCK_B, 128)
        if program == 0:
            aux = tl.zeros((), tl.float64)
            if part_ptr is not None:
                for start in range(0, sequences * E, 1024):
                    i = start + tl.arange(0, 1024)
                    aux += tl.sum(tl.load(part_ptr + i, mask=i < sequences * E, other=0.0), 0)
                aux = aux * E / sequences.to(tl.float64)
            tl.store(aux_ptr, aux.to(tl.float32))
    else:
        tile = program - E
        sequence = (tile // tiles_per_sequence).to(tl.int64)
        start = sequence * length + (tile % tiles_per_sequence) * TILE_T
        end = tl.minimum(start + TILE_T, (sequence + 1) * length)
        _write_maps(
            expert_ptr, base_ptr, total_ptr, order_ptr, position_ptr, start, end, tile,
            E, BINS, TOP_K, TILE_T, BLOCK_T, BLOCK_B, BLOCK_K,
        )  # fmt: skip
