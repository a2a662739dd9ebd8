"""The strongest slots of every expert at once, by the digits of their keys, without a sort.

A key is (strength, earlier slot first), so that no two are equal. Each pass counts one digit of
the keys that agree with what is known of the expert's weakest kept key, and fixes the next digit.
It stops when every expert's digits so far tell kept slots from shed ones.
"""

import triton
import triton.language as tl

from slipstream.ops.moe.route.balance_steps import grid_barrier
from slipstream.ops.moe.route.kernels import scores_of

BINS = tl.constexpr(2048)
PASSES = tl.constexpr(6)
SLOT_BITS = tl.constexpr(31)


@triton.jit
def strength_of(logits_ptr, stats_ptr, t, expert, inside, T, S: tl.constexpr):
    """The score of slots as an integer of the same order; scores are never negative."""
    SCORE: tl.constexpr = S.SCORE
    logits = tl.load(logits_ptr + t * S.E + expert, mask=inside, other=0.0).to(tl.float32)
    largest = tl.load(stats_ptr + t, mask=inside, other=0.0)
    total = tl.load(stats_ptr + T + t, mask=inside, other=1.0)
    return scores_of(logits, largest, total, SCORE).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def key_of(strength, n):
    """Stronger slots above, earlier slots above later ones of the same strength."""
    return (strength.to(tl.int64) << SLOT_BITS) | (0x7FFFFFFF - n).to(tl.int64)


@triton.jit
def first_bin(strength, expert):
    """Where the first pass counts a slot."""
    return expert * BINS + (strength >> 20)


@triton.jit
def _shift(step):
    # Digits of 11, 10 and 10 bits of the strength, then of the slot.
    return tl.where(step < 3, 51 - 10 * step, 50 - 10 * step).to(tl.int64)


@triton.jit
def select_strongest(
    target_ptr, strength_ptr, live_ptr, need_ptr, room_ptr, kth_ptr, hist_ptr, load_ptr,
    total_ptr, ticket_ptr, goal, limit, first, start, end, slots, S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``kth[e]``: the smallest key that expert e keeps; the first digit is counted already.

    In the first call a hot expert keeps its capacity and another all; later each keeps its room.
    """
    e = tl.arange(0, S.BLOCK_E)
    step = tl.zeros((), tl.int32)
    goal = grid_barrier(ticket_ptr, goal)
    for g in range(tl.program_id(0), S.E, tl.num_programs(0)):
        room = tl.load(room_ptr + g)
        hot = tl.load(load_ptr + g).to(tl.float64) > limit
        need = tl.where(first & (hot == 0), slots, room)
        total = _narrow(g, step, need, live_ptr, need_ptr, kth_ptr, hist_ptr)
        tl.store(room_ptr + g, tl.maximum(room - total, 0))
        tl.atomic_add(total_ptr, total.to(tl.int64), sem="relaxed")
    goal = grid_barrier(ticket_ptr, goal)
    live = tl.max(tl.load(live_ptr + e, mask=e < S.E, other=0), axis=0)
    step += 1
    while (live > 0) & (step < PASSES):
        for n0 in range(start, end, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            target = tl.load(target_ptr + n, mask=n < end, other=-1)
            counted = target >= 0
            counted &= tl.load(live_ptr + target, mask=counted, other=0) > 0
            strength = tl.load(strength_ptr + n, mask=counted, other=0)
            kth = tl.load(kth_ptr + target, mask=counted, other=0)
            key = key_of(strength, n)
            counted &= (key >> _shift(step - 1)) == (kth >> _shift(step - 1))
            digit = (key >> _shift(step)).to(tl.int32) & tl.where(step == 3, 2047, 1023)
            tl.atomic_add(hist_ptr + target * BINS + digit, 1, mask=counted, sem="relaxed")
        goal = grid_barrier(ticket_ptr, goal)
        for g in range(tl.program_id(0), S.E, tl.num_programs(0)):
            if tl.load(live_ptr + g) > 0:
                need = tl.load(need_ptr + g)
                _narrow(g, step, need, live_ptr, need_ptr, kth_ptr, hist_ptr)
        goal = grid_barrier(ticket_ptr, goal)
        live = tl.max(tl.load(live_ptr + e, mask=e < S.E, other=0), axis=0)
        step += 1
    return goal


@triton.jit
def _narrow(g, step, need, live_ptr, need_ptr, kth_ptr, hist_ptr):
    """Fix one digit of ``kth[g]`` and clear its counts; returns the number of slots counted."""
    digit = tl.arange(0, BINS)
    known = tl.load(kth_ptr + g, mask=step > 0, other=0)
    count = tl.load(hist_ptr + g * BINS + digit)
    total = tl.sum(count, axis=0)
    from_top = total - tl.cumsum(count, axis=0) + count
    mine = tl.max(tl.where(from_top >= need, digit, 0), axis=0)
    above = tl.sum(tl.where(digit > mine, count, 0), axis=0)
    inside = tl.sum(tl.where(digit == mine, count, 0), axis=0)
    splits = total > need
    tl.debug_barrier()
    tl.store(hist_ptr + g * BINS + digit, tl.zeros_like(digit))
    tl.store(kth_ptr + g, known + tl.where(splits, mine.to(tl.int64) << _shift(step), 0))
    tl.store(need_ptr + g, need - above)
    tl.store(live_ptr + g, (splits & (need - above < inside)).to(tl.int32))
    return total
