"""Load balancing after plain top-k, one launch for each mode: the rules of ``balance.py``.

Every program first looks at the load and leaves when nothing is hot: then balancing costs one
empty launch. Otherwise the programs, at most one per SM and so all resident, pass grid barriers
between the phases; each owns a run of tokens. Atomics only add integers: no result has an order.
"""

import triton
import triton.language as tl

from slipstream.ops.moe.route.balance_select import (
    BINS,
    first_bin,
    key_of,
    select_strongest,
    strength_of,
)
from slipstream.ops.moe.route.balance_steps import (
    grid_barrier,
    hot_and_capacity,
    keep_counts,
    ranked,
    report,
)
from slipstream.ops.moe.route.kernels import LOWEST, index_of, value_of

SCALARS = ["T", "chunk", "length", "tiles_per_sequence", "num_tiles", "depth"]
BLOCK_N = tl.constexpr(1024)


@triton.jit(do_not_specialize=SCALARS)
def balance_weight_kernel(
    logits_ptr, stats_ptr, bias_ptr, expert_ptr, weight_ptr, count_ptr, plain_count_ptr,
    load_ptr, threshold_ptr, slots_ptr, group_ptr, kth_ptr, hist_ptr, state_ptr,
    T, chunk, length, tiles_per_sequence, num_tiles, depth, scale, S: tl.constexpr,
):  # fmt: skip
    """Hot experts shed their weakest slots.

    ``slots (4, N)`` int32: expert now, expert asked (-1: none), shed, strength; ``group (3, E)``
    int32: undecided, keys still wanted, room; ``state`` int64, zeros: rerouted, ticket, proposals.
    """
    slots = T * S.TOP_K
    hot, limit, capacity = hot_and_capacity(load_ptr, threshold_ptr, slots, S)
    if hot == 0:
        return
    start = tl.program_id(0) * chunk
    end = tl.minimum(start + chunk, T)
    first, last = start * S.TOP_K, end * S.TOP_K
    wide = slots.to(tl.int64)
    now_ptr, target_ptr, shed_ptr = slots_ptr, slots_ptr + wide, slots_ptr + 2 * wide
    strength_ptr = slots_ptr + 3 * wide
    live_ptr, need_ptr, room_ptr = group_ptr, group_ptr + S.E, group_ptr + 2 * S.E
    ticket_ptr, total_ptr = state_ptr + 1, state_ptr + 2
    goal = tl.zeros((), tl.int64)
    keep_counts(count_ptr, plain_count_ptr, num_tiles, S)
    for g in range(tl.program_id(0), S.E, tl.num_programs(0)):
        tl.store(hist_ptr + g * BINS + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
        tl.store(room_ptr + g, capacity)
    goal = grid_barrier(ticket_ptr, goal)
    for n0 in range(first, last, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        inside = n < last
        expert = tl.load(expert_ptr + n, mask=inside, other=0).to(tl.int32)
        t = (n // S.TOP_K).to(tl.int64)
        strength = strength_of(logits_ptr, stats_ptr, t, expert, inside, T, S)
        tl.store(now_ptr + n, expert, mask=inside)
        tl.store(target_ptr + n, expert, mask=inside)
        tl.store(strength_ptr + n, strength, mask=inside)
        tl.atomic_add(hist_ptr + first_bin(strength, expert), 1, mask=inside, sem="relaxed")
    rounds = tl.zeros((), tl.int32)
    moving = tl.full((), 1, tl.int64)
    while (rounds <= depth) & (moving > 0):
        goal = select_strongest(
            target_ptr, strength_ptr, live_ptr, need_ptr, room_ptr, kth_ptr, hist_ptr, load_ptr,
            total_ptr + rounds, ticket_ptr, goal, limit, rounds == 0, first, last, slots, S,
            BLOCK_N,
        )  # fmt: skip
        for n0 in range(first, last, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            target = tl.load(target_ptr + n, mask=n < last, other=-1)
            asked = target >= 0
            key = key_of(tl.load(strength_ptr + n, mask=asked, other=0), n)
            kept = key >= tl.load(kth_ptr + target, mask=asked, other=0)
            tl.debug_barrier()
            tl.store(now_ptr + n, target, mask=asked & kept)
            tl.store(shed_ptr + n, (kept == 0).to(tl.int32), mask=asked)
            tl.store(target_ptr + n, tl.full((BLOCK_N,), -1, tl.int32), mask=asked)
        moving = tl.load(total_ptr + rounds)
        rounds += 1
        tl.debug_barrier()
        if (rounds <= depth) & (moving > 0):
            _propose(
                logits_ptr, stats_ptr, bias_ptr, expert_ptr, now_ptr, target_ptr, shed_ptr,
                strength_ptr, room_ptr, hist_ptr, start, end, T, S,
            )  # fmt: skip
    report(
        logits_ptr, stats_ptr, now_ptr, expert_ptr, weight_ptr, count_ptr, state_ptr, start, end,
        T, length, tiles_per_sequence, num_tiles, scale, S,
    )  # fmt: skip


@triton.jit
def _propose(
    logits_ptr, stats_ptr, bias_ptr, expert_ptr, now_ptr, target_ptr, shed_ptr, strength_ptr,
    room_ptr, hist_ptr, start, end, T, S: tl.constexpr,
):  # fmt: skip
    """The j-th shed slot of a token asks the token's j-th best expert with room that it lacks."""
    BLOCK_E: tl.constexpr = S.BLOCK_E
    e, k = tl.arange(0, BLOCK_E), tl.arange(0, S.BLOCK_K)
    full_E = tl.load(room_ptr + e, mask=e < S.E, other=0) <= 0
    for t0 in range(start, end, S.BLOCK_T):
        t = t0 + tl.arange(0, S.BLOCK_T).to(tl.int64)
        inside_T = t < end
        slot_T = t * S.TOP_K
        inside_TK = inside_T[:, None] & (k < S.TOP_K)[None, :]
        shed_TK = tl.load(shed_ptr + slot_T[:, None] + k[None, :], mask=inside_TK, other=0)
        if tl.max(tl.max(shed_TK, axis=1), axis=0) > 0:
            key_TE = ranked(logits_ptr, stats_ptr, bias_ptr, t, e, inside_T, T, S)
            key_TE = tl.where(full_E[None, :], LOWEST, key_TE)
            for slot in range(S.TOP_K):
                plain_T = tl.load(expert_ptr + slot_T + slot, mask=inside_T, other=-1)
                now_T = tl.load(now_ptr + slot_T + slot, mask=inside_T, other=-1)
                has_TE = (e[None, :] == plain_T[:, None]) | (e[None, :] == now_T[:, None])
                key_TE = tl.where(has_TE, LOWEST, key_TE)
            for slot in range(S.TOP_K):
                shed_T = tl.load(shed_ptr + slot_T + slot, mask=inside_T, other=0) > 0
                if tl.max(shed_T.to(tl.int32), axis=0) > 0:
                    best_T = tl.max(key_TE, axis=1)
                    target_T = index_of(best_T, BLOCK_E)
                    asks_T = shed_T & (value_of(best_T) > float("-inf"))
                    strength_T = strength_of(logits_ptr, stats_ptr, t, target_T, asks_T, T, S)
                    tl.store(target_ptr + slot_T + slot, target_T, mask=asks_T)
                    tl.store(strength_ptr + slot_T + slot, strength_T, mask=asks_T)
                    counted = hist_ptr + first_bin(strength_T, target_T)
                    tl.atomic_add(counted, 1, mask=asks_T, sem="relaxed")
                    taken_TE = asks_T[:, None] & (e[None, :] == target_T[:, None])
                    key_TE = tl.where(taken_TE, LOWEST, key_TE)


@triton.jit(do_not_specialize=SCALARS)
def balance_causal_kernel(
    logits_ptr, stats_ptr, bias_ptr, expert_ptr, weight_ptr, count_ptr, plain_count_ptr,
    load_ptr, threshold_ptr, slots_ptr, held_ptr, state_ptr,
    T, chunk, length, tiles_per_sequence, num_tiles, depth, scale, S: tl.constexpr,
):  # fmt: skip
    """While any expert is hot, all take slots in token order and shed the latest.

    ``slots (2, N)`` int32: expert now (-1: shed) in even and in odd rounds; ``held (2, P, E)``
    int32: slots that the tokens of each of P programs hold; ``state`` as above.
    """
    slots = T * S.TOP_K
    hot, _, capacity = hot_and_capacity(load_ptr, threshold_ptr, slots, S)
    if hot == 0:
        return
    start = tl.program_id(0) * chunk
    end = tl.minimum(start + chunk, T)
    BLOCK_E: tl.constexpr = S.BLOCK_E
    e = tl.arange(0, BLOCK_E)
    ticket_ptr, total_ptr = state_ptr + 1, state_ptr + 2
    goal = tl.zeros((), tl.int64)
    keep_counts(count_ptr, plain_count_ptr, num_tiles, S)
    held_E = tl.zeros((BLOCK_E,), tl.int32)
    for t0 in range(start, end, S.BLOCK_T):
        t = t0 + tl.arange(0, S.BLOCK_T).to(tl.int64)
        for slot in range(S.TOP_K):
            plain_T = tl.load(expert_ptr + t * S.TOP_K + slot, mask=t < end, other=-1)
            tl.store(slots_ptr + t * S.TOP_K + slot, plain_T.to(tl.int32), mask=t < end)
            held_E += tl.sum((e[None, :] == plain_T[:, None]).to(tl.int32), axis=0)
    rounds = tl.zeros((), tl.int32)
    moving = tl.full((), 1, tl.int64)
    now_ptr = slots_ptr
    while moving > 0:
        round_ptr = held_ptr + (rounds % 2) * tl.num_programs(0) * S.E
        tl.store(round_ptr + tl.program_id(0) * S.E + e, held_E, mask=e < S.E)
        goal = grid_barrier(ticket_ptr, goal)
        next_ptr = slots_ptr + (1 - rounds % 2) * slots.to(tl.int64)
        held_E, asked = _take_in_order(
            logits_ptr, stats_ptr, bias_ptr, expert_ptr, now_ptr, next_ptr, round_ptr, capacity,
            rounds < depth, start, end, T, S,
        )  # fmt: skip
        tl.atomic_add(total_ptr + rounds, asked.to(tl.int64), sem="relaxed")
        goal = grid_barrier(ticket_ptr, goal)
        moving = tl.load(total_ptr + rounds)
        now_ptr = next_ptr
        rounds += 1
    report(
        logits_ptr, stats_ptr, now_ptr, expert_ptr, weight_ptr, count_ptr, state_ptr, start, end,
        T, length, tiles_per_sequence, num_tiles, scale, S,
    )  # fmt: skip


@triton.jit
def _take_in_order(
    logits_ptr, stats_ptr, bias_ptr, expert_ptr, now_ptr, next_ptr, held_ptr, capacity,
    asking, start, end, T, S: tl.constexpr,
):  # fmt: skip
    """One round over this program's tokens: what they hold then per expert, and slots that ask."""
    BLOCK_T: tl.constexpr = S.BLOCK_T
    BLOCK_E: tl.constexpr = S.BLOCK_E
    e = tl.arange(0, BLOCK_E)
    before_E = _held_before(held_ptr, e, S)
    after_E = tl.zeros((BLOCK_E,), tl.int32)
    asked = tl.zeros((), tl.int32)
    for t0 in range(start, end, S.BLOCK_T):
        t = t0 + tl.arange(0, S.BLOCK_T).to(tl.int64)
        inside_T = t < end
        slot_T = t * S.TOP_K
        has_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.int32)
        plain_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.int1)
        for slot in range(S.TOP_K):
            now_T = tl.load(now_ptr + slot_T + slot, mask=inside_T, other=-1)
            plain_T = tl.load(expert_ptr + slot_T + slot, mask=inside_T, other=-1)
            has_TE += (e[None, :] == now_T[:, None]).to(tl.int32)
            plain_TE = plain_TE | (e[None, :] == plain_T[:, None])
        full_TE = before_E[None, :] + tl.cumsum(has_TE, axis=0) - has_TE >= capacity
        kept_TE = tl.where(full_TE, 0, has_TE)
        short_T = tl.where(inside_T, S.TOP_K - tl.sum(kept_TE, axis=1), 0)
        short = tl.max(short_T, axis=0)
        key_TE = tl.full((BLOCK_T, BLOCK_E), LOWEST, tl.int64)
        if (short > 0) & asking:
            key_TE = ranked(logits_ptr, stats_ptr, bias_ptr, t, e, inside_T, T, S)
            key_TE = tl.where(full_TE | plain_TE | (has_TE > 0), LOWEST, key_TE)
        for slot in range(S.TOP_K):
            next_T = tl.load(now_ptr + slot_T + slot, mask=inside_T, other=-1)
            if short > 0:
                mine_TE = (e[None, :] == next_T[:, None]) & (kept_TE > 0)
                shed_T = inside_T & (tl.max(mine_TE.to(tl.int32), axis=1) == 0)
                best_T = tl.max(key_TE, axis=1)
                asks_T = shed_T & (value_of(best_T) > float("-inf"))
                target_T = tl.where(asks_T, index_of(best_T, BLOCK_E), -1)
                next_T = tl.where(shed_T, target_T, next_T)
                taken_TE = e[None, :] == target_T[:, None]
                key_TE = tl.where(taken_TE, LOWEST, key_TE)
                kept_TE += taken_TE.to(tl.int32)
                asked += tl.sum(asks_T.to(tl.int32), axis=0)
            tl.store(next_ptr + slot_T + slot, next_T, mask=inside_T)
        after_E += tl.sum(kept_TE, axis=0)
        before_E += tl.sum(has_TE, axis=0)
    return after_E, asked


@triton.jit
def _held_before(held_ptr, e, S: tl.constexpr):
    """Slots held by the tokens of earlier programs, per expert."""
    ROWS: tl.constexpr = 16
    BLOCK_E: tl.constexpr = S.BLOCK_E
    held_E = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, tl.program_id(0), ROWS):
        p = first + tl.arange(0, ROWS)
        mask = (p < tl.program_id(0))[:, None] & (e < S.E)[None, :]
        held_PE = tl.load(held_ptr + p[:, None] * S.E + e[None, :], mask=mask, other=0)
        held_E += tl.sum(held_PE, axis=0)
    return held_E
