"""Load balancing after plain top-k, one launch for each mode: the rules of ``balance.py``.

The kernel of plain top-k leaves in ``state`` whether anything is hot; if nothing is, every program
ends at once, and balancing costs one empty launch. Otherwise the programs, at most one per SM and
so all resident, pass grid barriers between the phases; each owns a run of tokens, and some experts.
Atomics only add integers or set bits: no result has an order.
"""

import triton
import triton.language as tl

from slipstream.ops.moe.route.balance_rounds import ask, settle_by_strength, settle_in_order
from slipstream.ops.moe.route.balance_select import BINS, WORD, bin_of, full_from, weakest_kept
from slipstream.ops.moe.route.balance_steps import (
    arrive,
    capacity_of,
    grid_barrier,
    keep_counts,
    report,
    strength_of,
    wait,
)
from slipstream.ops.moe.route.kernels import hottest

SCALARS = ["T", "chunk", "length", "tiles_per_sequence", "num_tiles", "depth"]
BLOCK_N = tl.constexpr(2048)


@triton.jit(do_not_specialize=SCALARS)
def balance_weight_kernel(
    logits_ptr, stats_ptr, bias_ptr, expert_ptr, weight_ptr, count_ptr, plain_count_ptr,
    load_ptr, threshold_ptr, slots_ptr, group_ptr, least_ptr, hist_ptr, offer_ptr, state_ptr,
    T, chunk, length, tiles_per_sequence, num_tiles, depth, scale, S: tl.constexpr,
):  # fmt: skip
    """Hot experts shed their weakest slots.

    ``slots`` int32: expert now and experts asked (N each), ``todo (2, T)``; ``group (4, E)`` int32:
    room, slots that ask, of even rounds, then of odd ones; ``least (E,)`` int64: the least key an
    expert keeps; ``hist (E, BINS)`` and ``offer (2, E, T)`` int32: what each is offered. ``state``
    int64: rerouted, whether any is hot, ticket, slots that ask in each round; zeros but the second.
    """
    if tl.load(state_ptr + 1) == 0:
        return
    E: tl.constexpr = S.E
    BLOCK_E: tl.constexpr = S.BLOCK_E
    _, limit = hottest(load_ptr, threshold_ptr, E, BLOCK_E)
    slots = T * S.TOP_K
    capacity = capacity_of(threshold_ptr, slots, S)
    start = tl.program_id(0) * chunk
    end = tl.minimum(start + chunk, T)
    wide = slots.to(tl.int64)
    now_ptr, asked_ptr, todo_ptr = slots_ptr, slots_ptr + wide, slots_ptr + 2 * wide
    ticket_ptr, total_ptr = state_ptr + 2, state_ptr + 3
    for g in range(tl.program_id(0), S.E, tl.num_programs(0)):
        tl.store(hist_ptr + g * BINS + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
    goal = arrive(ticket_ptr, tl.zeros((), tl.int64))
    keep_counts(count_ptr, plain_count_ptr, num_tiles, S)
    _offer_none(load_ptr, limit, offer_ptr, start, end, T, S)
    wait(ticket_ptr, goal)
    _offer_plain(
        logits_ptr, stats_ptr, expert_ptr, load_ptr, limit, hist_ptr, offer_ptr, start, end, T, S
    )
    goal = arrive(ticket_ptr, goal)
    _measure_room(count_ptr, group_ptr, capacity, num_tiles, S)
    wait(ticket_ptr, goal)
    e = tl.arange(0, S.BLOCK_E)
    rounds = tl.zeros((), tl.int32)
    count = end - start
    asking = tl.full((), 1, tl.int64)
    over = tl.full((), 1, tl.int32)
    while asking > 0:
        room_ptr = group_ptr + rounds % 2 * 2 * S.E
        if over > 0:
            before_ptr = group_ptr + (1 - rounds % 2) * 2 * S.E
            _keep_strongest(
                before_ptr, room_ptr, least_ptr, hist_ptr, offer_ptr, rounds == 0, capacity, T, S
            )
            goal = grid_barrier(ticket_ptr, goal)
        count = settle_by_strength(
            logits_ptr, stats_ptr, expert_ptr, now_ptr, asked_ptr, todo_ptr, least_ptr,
            rounds == 0, over <= 0, start, count, T, S,
        )  # fmt: skip
        asking = tl.zeros((), tl.int64)
        if (rounds < depth) & (over > 0):
            mine = ask(
                logits_ptr, stats_ptr, bias_ptr, expert_ptr, now_ptr, asked_ptr, todo_ptr, room_ptr,
                room_ptr + S.E, hist_ptr, offer_ptr, rounds == 0, start, count, T, S, False,
            )  # fmt: skip
            tl.atomic_add(total_ptr + rounds, mine.to(tl.int64), sem="relaxed")
            goal = grid_barrier(ticket_ptr, goal)
            asking = tl.load(total_ptr + rounds)
            room_E = tl.load(room_ptr + e, mask=e < S.E, other=0)
            over = tl.max(tl.load(room_ptr + S.E + e, mask=e < S.E, other=0) - room_E, axis=0)
        rounds += 1
    report(
        logits_ptr, stats_ptr, now_ptr, expert_ptr, weight_ptr, count_ptr, state_ptr, start, end,
        T, length, tiles_per_sequence, num_tiles, scale, S,
    )  # fmt: skip


@triton.jit
def _offer_none(load_ptr, limit, offer_ptr, start, end, T, S: tl.constexpr):
    """Nothing is offered to hot experts by this program's tokens; other experts' rows are lists."""
    ROWS: tl.constexpr = 64
    BLOCK_E: tl.constexpr = S.BLOCK_E
    e = tl.arange(0, BLOCK_E)[:, None]
    load_E1 = tl.load(load_ptr + e, mask=e < S.E, other=0)
    hot_E1 = (load_E1.to(tl.float64) > limit) & (e < S.E)
    none_ET = tl.full((BLOCK_E, ROWS), -1, tl.int32)
    for t0 in range(start, end, ROWS):
        t = t0 + tl.arange(0, ROWS)[None, :]
        tl.store(offer_ptr + e.to(tl.int64) * T + t, none_ET, mask=hot_E1 & (t < end))


@triton.jit
def _offer_plain(
    logits_ptr, stats_ptr, expert_ptr, load_ptr, limit, hist_ptr, offer_ptr, start, end, T,
    S: tl.constexpr,
):  # fmt: skip
    """Hot experts are offered their slots of plain top-k, a token at its place."""
    for n0 in range(start * S.TOP_K, end * S.TOP_K, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        inside = n < end * S.TOP_K
        expert = tl.load(expert_ptr + n, mask=inside, other=0).to(tl.int32)
        hot = inside & (tl.load(load_ptr + expert, mask=inside, other=0).to(tl.float64) > limit)
        t = (n // S.TOP_K).to(tl.int64)
        strength = strength_of(logits_ptr, stats_ptr, t, expert, hot, T, S)
        tl.store(offer_ptr + expert.to(tl.int64) * T + t, strength, mask=hot)
        tl.atomic_add(hist_ptr + expert * BINS + bin_of(strength), 1, mask=hot, sem="relaxed")


@triton.jit
def _measure_room(count_ptr, group_ptr, capacity, num_tiles, S: tl.constexpr):
    """The room that experts have beside plain top-k."""
    BLOCK: tl.constexpr = 1024
    for g in range(tl.program_id(0), S.E, tl.num_programs(0)):
        held = tl.zeros((), tl.int32)
        for first in range(0, num_tiles, BLOCK):
            tile = first + tl.arange(0, BLOCK)
            count = count_ptr + num_tiles.to(tl.int64) * g + tile
            held += tl.sum(tl.load(count, mask=tile < num_tiles, other=0), axis=0)
        tl.store(group_ptr + g, tl.maximum(capacity - held, 0))


@triton.jit
def _keep_strongest(
    before_ptr, room_ptr, least_ptr, hist_ptr, offer_ptr, first, capacity, T, S: tl.constexpr
):  # fmt: skip
    """What each expert keeps of what it is offered, and the room that is left, or was at first."""
    for g in range(tl.program_id(0), S.E, tl.num_programs(0)):
        strength_ptr = offer_ptr + T.to(tl.int64) * g
        token_ptr = strength_ptr + T.to(tl.int64) * S.E
        room = tl.load(before_ptr + g, mask=first == 0, other=0)
        asked = tl.load(before_ptr + S.E + g, mask=first == 0, other=0)
        entries = tl.where(first, T, asked)
        need = tl.where(first, capacity, room)
        least, offered = weakest_kept(
            hist_ptr + g * BINS, strength_ptr, token_ptr, first == 0, entries, need
        )
        tl.store(least_ptr + g, least)
        tl.store(room_ptr + g, tl.maximum(room - offered, 0), mask=first == 0)
        tl.store(room_ptr + S.E + g, 0)


@triton.jit(do_not_specialize=SCALARS)
def balance_causal_kernel(
    logits_ptr, stats_ptr, bias_ptr, expert_ptr, weight_ptr, count_ptr, plain_count_ptr,
    load_ptr, threshold_ptr, slots_ptr, bits_ptr, full_ptr, state_ptr,
    T, chunk, length, tiles_per_sequence, num_tiles, depth, scale, S: tl.constexpr,
):  # fmt: skip
    """While any expert is hot, all take slots in token order and shed the latest.

    ``bits (E, words)``: a bit for each token that asked an expert, the first plain top-k; those of
    slots shed since lie after the token from which the expert is full, ``full (E,)``. ``slots``
    and ``state`` as above.
    """
    if tl.load(state_ptr + 1) == 0:
        return
    slots = T * S.TOP_K
    capacity = capacity_of(threshold_ptr, slots, S)
    start = tl.program_id(0) * chunk
    end = tl.minimum(start + chunk, T)
    wide = slots.to(tl.int64)
    now_ptr, asked_ptr, todo_ptr = slots_ptr, slots_ptr + wide, slots_ptr + 2 * wide
    ticket_ptr, total_ptr = state_ptr + 2, state_ptr + 3
    _hold_plain(expert_ptr, now_ptr, bits_ptr, start, end, T, S)
    goal = arrive(ticket_ptr, tl.zeros((), tl.int64))
    keep_counts(count_ptr, plain_count_ptr, num_tiles, S)
    wait(ticket_ptr, goal)
    _fill_in_order(bits_ptr, full_ptr, capacity, T, S)
    goal = grid_barrier(ticket_ptr, goal)
    rounds = tl.zeros((), tl.int32)
    asking = tl.full((), 1, tl.int64)
    while asking > 0:
        count = settle_in_order(now_ptr, asked_ptr, todo_ptr, full_ptr, start, end, T, S)
        asking = tl.zeros((), tl.int64)
        if rounds < depth:
            mine = ask(
                logits_ptr, stats_ptr, bias_ptr, expert_ptr, now_ptr, asked_ptr, todo_ptr, full_ptr,
                full_ptr, bits_ptr, bits_ptr, rounds == 0, start, count, T, S, True,
            )  # fmt: skip
            tl.atomic_add(total_ptr + rounds, mine.to(tl.int64), sem="relaxed")
            goal = grid_barrier(ticket_ptr, goal)
            asking = tl.load(total_ptr + rounds)
            if asking > 0:
                _fill_in_order(bits_ptr, full_ptr, capacity, T, S)
                goal = grid_barrier(ticket_ptr, goal)
        rounds += 1
    report(
        logits_ptr, stats_ptr, now_ptr, expert_ptr, weight_ptr, count_ptr, state_ptr, start, end,
        T, length, tiles_per_sequence, num_tiles, scale, S,
    )  # fmt: skip


@triton.jit
def _hold_plain(expert_ptr, now_ptr, bits_ptr, start, end, T, S: tl.constexpr):
    """Plain top-k as ``now`` and as bits; no other program has bits in these words."""
    WORDS: tl.constexpr = 16
    BLOCK_E: tl.constexpr = S.BLOCK_E
    words = (T + WORD - 1) // WORD
    e = tl.arange(0, BLOCK_E).to(tl.int64)[:, None]
    none_EW = tl.zeros((BLOCK_E, WORDS), tl.int32)
    for w0 in range(start // WORD, (end + WORD - 1) // WORD, WORDS):
        w = w0 + tl.arange(0, WORDS)[None, :]
        inside_EW = (e < S.E) & (w < (end + WORD - 1) // WORD)
        tl.store(bits_ptr + e * words + w, none_EW, mask=inside_EW)
    tl.debug_barrier()
    for n0 in range(start * S.TOP_K, end * S.TOP_K, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        inside = n < end * S.TOP_K
        expert = tl.load(expert_ptr + n, mask=inside, other=0)
        t = n // S.TOP_K
        bit = tl.full((BLOCK_N,), 1, tl.int32) << t % WORD
        tl.store(now_ptr + n, expert.to(tl.int32), mask=inside)
        tl.atomic_or(bits_ptr + expert * words + t // WORD, bit, mask=inside, sem="relaxed")


@triton.jit
def _fill_in_order(bits_ptr, full_ptr, capacity, T, S: tl.constexpr):
    """The token from which each expert is full."""
    words = (T + WORD - 1) // WORD
    for g in range(tl.program_id(0), S.E, tl.num_programs(0)):
        full = full_from(bits_ptr + words.to(tl.int64) * g, words, capacity, T)
        tl.store(full_ptr + g, full)
