"""One round of the balance kernels: what became of the slots that asked, and who asks next.

Each program lists those of its tokens that have shed slots (``todo``: token, shed slots), so that
later rounds look at few. ``asked`` holds the experts a token asks, best first.
"""

import triton
import triton.language as tl

from slipstream.ops.moe.route.balance_select import BINS, WORD, bin_of
from slipstream.ops.moe.route.balance_steps import (
    beyond_plain,
    key_of,
    ranked,
    strength_bits,
    strength_of,
)
from slipstream.ops.moe.route.kernels import LOWEST_32, value_of

PENDING = tl.constexpr(-1)
"""Of ``now``: a shed slot that may have asked."""
STUCK = tl.constexpr(-2)
"""Of ``now``: a shed slot that found no expert, and never will."""


@triton.jit
def settle_by_strength(
    logits_ptr, stats_ptr, expert_ptr, now_ptr, asked_ptr, todo_ptr, least_ptr, first, all_kept,
    start, count, T, S: tl.constexpr,
):  # fmt: skip
    """Slots whose key is below what their expert keeps are shed; returns the tokens that have any.

    ``first``: every slot of ``count`` tokens is at its expert of plain top-k; else the tokens are
    listed, and shed slots take the expert they asked. ``all_kept``: no expert sheds.
    """
    k = tl.arange(0, S.BLOCK_K)[None, :]
    found = tl.zeros((), tl.int32)
    for i0 in range(0, count, S.BLOCK_S):
        i = i0 + tl.arange(0, S.BLOCK_S)
        listed_T = tl.load(todo_ptr + start + i, mask=(i < count) & (first == 0), other=0)
        t = tl.where(first, start + i, listed_T)[:, None]
        slot_TK = t.to(tl.int64) * S.TOP_K + k
        inside_TK = (i < count)[:, None] & (k < S.TOP_K)
        plain_TK = tl.load(expert_ptr + slot_TK, mask=inside_TK & first, other=0).to(tl.int32)
        now_TK = tl.load(now_ptr + slot_TK, mask=inside_TK & (first == 0), other=PENDING)
        asks_TK = inside_TK & (now_TK == PENDING)
        target_TK = _asked(asked_ptr, slot_TK, k, asks_TK & (first == 0))
        target_TK = tl.where(first, plain_TK, target_TK)
        asks_TK &= target_TK >= 0
        sifted_TK = asks_TK & (all_kept == 0)
        least_TK = tl.load(least_ptr + target_TK, mask=sifted_TK, other=0)
        sifted_TK &= least_TK > 0
        t64 = t.to(tl.int64)
        strength_TK = strength_of(logits_ptr, stats_ptr, t64, target_TK, sifted_TK, T, S)
        kept_TK = asks_TK & (key_of(strength_TK, t) >= least_TK)
        left_TK = inside_TK & (now_TK == PENDING) & (kept_TK == 0)
        now_TK = tl.where(kept_TK, target_TK, PENDING)
        tl.debug_barrier()
        tl.store(now_ptr + slot_TK, now_TK, mask=kept_TK | left_TK)
        found = _list(todo_ptr, start, found, tl.where(first, start + i, listed_T), left_TK, T)
    tl.debug_barrier()
    return found


@triton.jit
def settle_in_order(now_ptr, asked_ptr, todo_ptr, full_ptr, start, end, T, S: tl.constexpr):
    """Shed slots hold the expert they asked; then tokens from which an expert is full shed it."""
    k = tl.arange(0, S.BLOCK_K)[None, :]
    found = tl.zeros((), tl.int32)
    for t0 in range(start, end, S.BLOCK_S):
        t = t0 + tl.arange(0, S.BLOCK_S)
        slot_TK = t.to(tl.int64)[:, None] * S.TOP_K + k
        inside_TK = (t < end)[:, None] & (k < S.TOP_K)
        was_TK = tl.load(now_ptr + slot_TK, mask=inside_TK, other=STUCK)
        asks_TK = was_TK == PENDING
        target_TK = _asked(asked_ptr, slot_TK, k, asks_TK)
        now_TK = tl.where(asks_TK, tl.where(target_TK >= 0, target_TK, STUCK), was_TK)
        full_TK = tl.load(full_ptr + now_TK, mask=now_TK >= 0, other=T)
        shed_TK = t[:, None] >= full_TK
        shed_TK &= now_TK >= 0
        now_TK = tl.where(shed_TK, PENDING, now_TK)
        tl.debug_barrier()
        tl.store(now_ptr + slot_TK, now_TK, mask=inside_TK & (now_TK != was_TK))
        tl.store(now_ptr + slot_TK, now_TK, mask=shed_TK)
        found = _list(todo_ptr, start, found, t, shed_TK, T)
    tl.debug_barrier()
    return found


@triton.jit
def _asked(asked_ptr, slot_TK, k, asks_TK):
    """The j-th shed slot of a token asked the j-th expert of its list; -1: none."""
    nth_TK = tl.cumsum(asks_TK.to(tl.int32), axis=1) - 1
    return tl.load(asked_ptr + slot_TK - k + nth_TK, mask=asks_TK, other=-1)


@triton.jit
def _list(todo_ptr, start, found, t, shed_TK, T):
    """Append the tokens that have shed slots."""
    short_T = tl.sum(shed_TK.to(tl.int32), axis=1)
    has_T = short_T > 0
    place_T = start + found + tl.cumsum(has_T.to(tl.int32), axis=0) - 1
    tl.store(todo_ptr + place_T, t, mask=has_T)
    tl.store(todo_ptr + T + place_T, short_T, mask=has_T)
    return found + tl.sum(has_T.to(tl.int32), axis=0)


@triton.jit
def ask(
    logits_ptr, stats_ptr, bias_ptr, expert_ptr, now_ptr, asked_ptr, todo_ptr, open_ptr, fill_ptr,
    hist_ptr, offer_ptr, first, start, count, T, S: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The j-th shed slot asks the token's j-th best open expert that it lacks; how many do.

    ``open``: the room of each expert, or the token from which it is full. ``offer (2, E, T)``: the
    strength and the token of each slot that asks an expert, counted in ``fill`` and ``hist``; or a
    row of bits for each expert, one a token.
    """
    E: tl.constexpr = S.E
    BLOCK_E: tl.constexpr = S.BLOCK_E
    e = tl.arange(0, BLOCK_E)
    open_E = tl.load(open_ptr + e, mask=e < E, other=0)
    asking = tl.zeros((), tl.int32)
    for i0 in range(0, count, S.BLOCK_T):
        i = i0 + tl.arange(0, S.BLOCK_T)
        inside_T = i < count
        t = tl.load(todo_ptr + start + i, mask=inside_T, other=0).to(tl.int64)
        short_T = tl.load(todo_ptr + T + start + i, mask=inside_T, other=0)
        value_TE, score_TE = ranked(logits_ptr, stats_ptr, bias_ptr, t, e, inside_T, T, S)
        slot_T = t * S.TOP_K
        last_T = tl.load(expert_ptr + slot_T + S.TOP_K - 1, mask=inside_T, other=0).to(tl.int32)
        value_TE = beyond_plain(value_TE, e, last_T)
        closed_TE = (t[:, None] >= open_E[None, :]) if CAUSAL else (open_E <= 0)[None, :]
        value_TE = tl.where(closed_TE, LOWEST_32, value_TE)
        if first == 0:
            for slot in range(S.TOP_K):
                now_T = tl.load(now_ptr + slot_T + slot, mask=inside_T, other=PENDING)
                value_TE = tl.where(e[None, :] == now_T[:, None], LOWEST_32, value_TE)
        left_TE = value_TE
        for j in range(tl.max(short_T, axis=0)):
            best_T = tl.max(left_TE, axis=1)
            best_TE = left_TE == best_T[:, None]
            index_T = tl.min(tl.where(best_TE, e[None, :], BLOCK_E - 1), axis=1)
            allowed_T = value_of(best_T.to(tl.int64) << 32) > float("-inf")
            target_T = tl.where(allowed_T & (j < short_T), index_T, -1)
            tl.store(asked_ptr + slot_T + j, target_T, mask=j < short_T)
            left_TE = tl.where(e[None, :] == target_T[:, None], LOWEST_32, left_TE)
        asks_TE = left_TE != value_TE
        asking += tl.sum(tl.sum(asks_TE.to(tl.int32), axis=1), axis=0)
        row_E = e.to(tl.int64)[None, :]
        if CAUSAL:
            bit_T = (tl.full(t.shape, 1, tl.int32) << (t % WORD).to(tl.int32))[:, None]
            word_TE = row_E * ((T + WORD - 1) // WORD) + (t // WORD)[:, None]
            bit_TE = tl.broadcast_to(bit_T, asks_TE.shape)
            tl.atomic_or(offer_ptr + word_TE, bit_TE, mask=asks_TE, sem="relaxed")
        else:
            strength_TE = strength_bits(score_TE)
            bin_TE = row_E * BINS + bin_of(strength_TE)
            tl.atomic_add(hist_ptr + bin_TE, 1, mask=asks_TE, sem="relaxed")
            fill_TE = tl.broadcast_to(fill_ptr + e[None, :], asks_TE.shape)
            place_TE = row_E * T + tl.atomic_add(fill_TE, 1, mask=asks_TE, sem="relaxed")
            token_TE = tl.broadcast_to(t.to(tl.int32)[:, None], asks_TE.shape)
            tl.store(offer_ptr + place_TE, strength_TE, mask=asks_TE)
            tl.store(offer_ptr + T.to(tl.int64) * E + place_TE, token_TE, mask=asks_TE)
    return asking
