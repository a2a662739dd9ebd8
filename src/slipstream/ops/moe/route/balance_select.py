"""What each expert keeps: the key of its weakest slot, or the token from which it is full.

One program serves an expert and reads only what that expert was offered, so experts do not wait
for each other. Counts of coarse bins, made when slots are offered, leave few of them in question.
"""

import triton
import triton.language as tl

from slipstream.ops.moe.route.balance_steps import LATEST, earliness

BINS = tl.constexpr(2048)
BIN_SHIFT = tl.constexpr(16)
TOP_DIGIT = tl.constexpr(0x3F80)
"""The bits of 1.0 above ``BIN_SHIFT``: scores below 1 / 65536 share the lowest bin."""
PROBES = tl.constexpr(4)
BLOCK_N = tl.constexpr(8192)
BLOCK_P = tl.constexpr(2048)
BLOCK_W = tl.constexpr(1024)
WORD = tl.constexpr(32)
"""Tokens whose bits share a word."""


@triton.jit
def bin_of(strength):
    """The bin that counts a strength; 128 for each factor of 2."""
    return tl.minimum(tl.maximum((strength >> BIN_SHIFT) - TOP_DIGIT, 1 - BINS), 0) + BINS - 1


@triton.jit
def weakest_kept(hist_ptr, strength_ptr, token_ptr, listed, entries, need):
    """The least key among the ``need`` strongest, 0 if that is all; and how many were offered.

    ``hist``: counts of the offered slots, cleared here. ``strength``: ``entries`` of them, negative
    ones being none, spent here; their tokens are in ``token`` if ``listed``, else an entry's place
    is its token.
    """
    b = tl.arange(0, BINS)
    count = tl.load(hist_ptr + b)
    offered = tl.sum(count, axis=0)
    least = tl.zeros((), tl.int64)
    if offered > need:
        from_top = offered - tl.cumsum(count, axis=0) + count
        mine = tl.max(tl.where(from_top >= need, b, 0), axis=0)
        above = tl.max(tl.where(from_top < need, from_top, 0), axis=0)
        inside = tl.load(hist_ptr + mine)
        digit = mine + 1 - BINS + TOP_DIGIT
        low = tl.where(mine == 0, 0, digit << BIN_SHIFT)
        high = tl.where(mine == BINS - 1, LATEST, (digit + 1) << BIN_SHIFT)
        if inside > need - above:
            _gather(strength_ptr, token_ptr, listed, entries, low, high)
        least = _search(strength_ptr, token_ptr, inside, need - above, low, high)
    tl.debug_barrier()
    tl.store(hist_ptr + b, tl.zeros_like(b))
    return least, offered


@triton.jit
def _gather(strength_ptr, token_ptr, listed, entries, low, high):
    """Move the entries from ``low`` to below ``high`` to the front."""
    found = tl.zeros((), tl.int32)
    for n0 in range(0, entries, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        mine = tl.load(strength_ptr + n, mask=n < entries, other=-1)
        inside = (mine >= low) & (mine < high)
        token = tl.load(token_ptr + n, mask=inside & listed, other=0)
        token = tl.where(listed, token, n)
        place = found + tl.cumsum(inside.to(tl.int32), axis=0) - 1
        found += tl.sum(inside.to(tl.int32), axis=0)
        tl.debug_barrier()
        tl.store(strength_ptr + place, mine, mask=inside)
        tl.store(token_ptr + place, token, mask=inside)
    tl.debug_barrier()


@triton.jit
def _search(strength_ptr, token_ptr, count, need, low, high):
    """The least key among the ``need`` strongest of ``count`` entries, all in the range given.

    Each step counts at PROBES values of the range: ``count`` entries reach ``low``, ``fewer`` reach
    ``high``. If strengths are equal, the search goes on among those, by earliness.
    """
    entries = count
    fewer = tl.zeros((), tl.int32)
    tied = tl.full((), -1, tl.int32)
    p = tl.arange(0, PROBES)
    while count > need:
        if high - low == 1:
            tied = low
            count -= fewer
            need -= fewer
            fewer = tl.zeros((), tl.int32)
            low = tl.zeros((), tl.int32)
            high = low + LATEST
        step_P = ((p + 1).to(tl.int64) * (high - low) + PROBES) // (PROBES + 1)
        value_P = low + step_P.to(tl.int32)
        count_P = _at_least(strength_ptr, token_ptr, entries, value_P, tied)
        reached_P = count_P >= need
        count = tl.min(tl.where(reached_P, count_P, count), axis=0)
        fewer = tl.max(tl.where(reached_P, fewer, count_P), axis=0)
        low = tl.max(tl.where(reached_P, value_P, low), axis=0)
        high = tl.min(tl.where(reached_P, high, value_P), axis=0)
    strength = tl.where(tied < 0, low, tied).to(tl.int64)
    return (strength << 32) | tl.where(tied < 0, 0, low).to(tl.int64)


@triton.jit
def _at_least(strength_ptr, token_ptr, entries, value_P, tied):
    """How many entries reach each value; of strength ``tied``, by earliness, if not negative."""
    count_NP = tl.zeros((BLOCK_P, PROBES), tl.int32)
    for n0 in range(0, entries, BLOCK_P):
        n = n0 + tl.arange(0, BLOCK_P)[:, None]
        mine = tl.load(strength_ptr + n, mask=n < entries, other=-1)
        if tied >= 0:
            early = earliness(tl.load(token_ptr + n, mask=n < entries, other=0))
            mine = tl.where(mine == tied, early, -1)
        count_NP += (mine >= value_P[None, :]).to(tl.int32)
    return tl.sum(count_NP, axis=0)


@triton.jit
def full_from(bits_ptr, words, capacity, T):
    """The first token that comes after ``capacity`` tokens with a bit in a row of ``bits``."""
    total = tl.zeros((), tl.int32)
    place = tl.zeros((), tl.int32)
    before = tl.zeros((), tl.int32)
    for w0 in range(0, words, BLOCK_W):
        w = w0 + tl.arange(0, BLOCK_W)
        count = _ones(tl.load(bits_ptr + w, mask=w < words, other=0))
        upto = total + tl.cumsum(count, axis=0)
        early = (upto < capacity) & (w < words)
        place += tl.sum(early.to(tl.int32), axis=0)
        before = tl.maximum(before, tl.max(tl.where(early, upto, 0), axis=0))
        total += tl.sum(count, axis=0)
    token = T
    if total >= capacity:
        held = (tl.load(bits_ptr + place) >> tl.arange(0, WORD)) & 1
        early = before + tl.cumsum(held, axis=0) < capacity
        token = place * WORD + tl.sum(early.to(tl.int32), axis=0) + 1
    return token


@triton.jit
def _ones(word):
    """The number of bits set."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24) & 0xFF
