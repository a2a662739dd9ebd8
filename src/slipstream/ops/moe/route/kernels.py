"""Scores, exact top-k, weights and their backward; every score is one expression, ``scores_of``.

Balancing and the backward compute scores again from the logits: an elementwise function of a logit
and of its row's saved maximum and sum, so that they are bitwise those of the choice.
"""

import triton
import triton.language as tl

from slipstream.ops.elementary import exponential

LOWEST = tl.constexpr(-(2**63))
LOWEST_32 = tl.constexpr(-(2**31))
HIGHEST = tl.constexpr(2**63 - 1)
TINY = tl.constexpr(2.0**-126)


@triton.jit
def scores_of(logits, largest, total, SCORE: tl.constexpr):
    """Gate scores in fp32; ``largest`` and ``total`` of the row, as ``stats_of`` gives them."""
    if SCORE == "softmax":
        return tl.div_rn(exponential(logits - largest), total)
    else:
        small = exponential(-tl.abs(logits))
        return tl.div_rn(tl.where(logits < 0, small, 1.0), 1.0 + small)


@triton.jit
def stats_of(logits_TE):
    """The maximum of each row, and the sum of ``exp(logit - maximum)``."""
    largest_T = tl.max(logits_TE, axis=1)
    return largest_T, tl.sum(exponential(logits_TE - largest_T[:, None]), axis=1)


@triton.jit
def ordered_of(select):
    """int32 in the order of ``select``; NaN is largest, -0.0 equals 0.0."""
    bits = tl.where(select == 0.0, 0.0, select).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(select != select, 0x7FC00000, ordered)


@triton.jit
def keys_of(select, index, BLOCK_E: tl.constexpr):
    """int64 that sort as (``select``, lower index first)."""
    return (ordered_of(select).to(tl.int64) << 32) | (BLOCK_E - 1 - index).to(tl.int64)


@triton.jit
def index_of(key, BLOCK_E: tl.constexpr):
    """The index in a key."""
    return BLOCK_E - 1 - (key & (BLOCK_E - 1)).to(tl.int32)


@triton.jit
def value_of(key):
    """The fp32 value in a key."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def open_groups(
    key_TE, e, E: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """``key_TE`` with the experts outside of each token's best groups at LOWEST."""
    group_E = e // (E // GROUPS)
    g = tl.arange(0, BLOCK_G)
    value_TG = tl.zeros((BLOCK_T, BLOCK_G), tl.float32)
    for group in range(GROUPS):
        members = tl.where((group_E == group)[None, :], key_TE, LOWEST)
        best_T = tl.full((BLOCK_T,), HIGHEST, tl.int64)
        sum_T = tl.zeros((BLOCK_T,), tl.float32)
        for _ in range(GROUP_TOP):
            best_T = tl.max(tl.where(members < best_T[:, None], members, LOWEST), axis=1)
            sum_T += value_of(best_T)
        value_TG = tl.where((g == group)[None, :], sum_T[:, None], value_TG)
    key_TG = tl.where((g < GROUPS)[None, :], keys_of(value_TG, g[None, :], BLOCK_G), LOWEST)
    best_T = tl.full((BLOCK_T,), HIGHEST, tl.int64)
    open_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.int1)
    for _ in range(TOP_GROUPS):
        best_T = tl.max(tl.where(key_TG < best_T[:, None], key_TG, LOWEST), axis=1)
        open_TE = open_TE | (group_E[None, :] == index_of(best_T, BLOCK_G)[:, None])
    return tl.where(open_TE, key_TE, LOWEST)


@triton.jit
def top_indices(
    value_TE, e, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Indices of each row's TOP_K largest int32, ties by index, and ``value_TE`` without them.

    The order of ``keys_of``; two reductions of 32 bits are less work than one of 64.
    """
    k = tl.arange(0, BLOCK_K)
    index_TK = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for slot in range(TOP_K):
        best_T = tl.max(value_TE, axis=1)
        index_T = tl.min(tl.where(value_TE == best_T[:, None], e[None, :], BLOCK_E - 1), axis=1)
        value_TE = tl.where(e[None, :] == index_T[:, None], LOWEST_32, value_TE)
        index_TK = tl.where((k == slot)[None, :], index_T[:, None], index_TK)
    return index_TK, value_TE


@triton.jit
def weights_of(score_TK, scale, NORMALIZE: tl.constexpr):
    """Weights of the slots of a token from their scores (0 where there is no slot)."""
    if NORMALIZE:
        total_T = tl.maximum(tl.sum(score_TK, axis=1), TINY)
        score_TK = tl.div_rn(score_TK, tl.broadcast_to(total_T[:, None], score_TK.shape))
    return score_TK * scale


@triton.jit
def slot_scores(logits_ptr, t, index_TK, largest_T, total_T, inside_TK, E, SCORE: tl.constexpr):
    """Scores of chosen experts, gathered; 0 where there is no slot."""
    logits_TK = tl.load(logits_ptr + t[:, None] * E + index_TK, mask=inside_TK, other=0.0)
    score_TK = scores_of(logits_TK.to(tl.float32), largest_T[:, None], total_T[:, None], SCORE)
    return tl.where(inside_TK, score_TK, 0.0)


@triton.jit
def load_logits(logits_ptr, t, e, inside_T, E):
    """A tile of logits in fp32: 0 for tokens outside, -inf for experts that do not exist."""
    inside_TE = inside_T[:, None] & (e < E)[None, :]
    logits_TE = tl.load(logits_ptr + t[:, None] * E + e[None, :], mask=inside_TE, other=0.0)
    return tl.where((e < E)[None, :], logits_TE.to(tl.float32), float("-inf"))


@triton.jit
def tile_of(T, length, tiles_per_sequence, TILE_T: tl.constexpr):
    """First token and end of this program's tile; a tile lies in one sequence."""
    tile = tl.program_id(0)
    sequence = (tile // tiles_per_sequence).to(tl.int64)
    start = sequence * length + (tile % tiles_per_sequence) * TILE_T
    return tile, start, tl.minimum(start + TILE_T, (sequence + 1) * length)


@triton.jit
def hottest(load_ptr, threshold_ptr, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """1 if an expert is hot, else 0, and the load above which one is."""
    e = tl.arange(0, BLOCK_E)
    load_E = tl.load(load_ptr + e, mask=e < E, other=0).to(tl.float64)
    limit = tl.load(threshold_ptr).to(tl.float64) * (tl.sum(load_E, axis=0) / E)
    hot = tl.max(((load_E > limit) & (e < E)).to(tl.int32), axis=0)
    return hot, limit


@triton.jit
def _begin_balance(
    state_ptr, load_ptr, threshold_ptr, state_size, E: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    """Looked at here, beside all other work, so that balancing begins with a single load."""
    if state_ptr is not None:
        hot, _ = hottest(load_ptr, threshold_ptr, E, BLOCK_E)
        for i in range(state_size):
            tl.store(state_ptr + i, tl.where(i == 1, hot, 0))


@triton.jit(do_not_specialize=["T", "length", "tiles_per_sequence", "num_tiles", "state_size"])
def moe_choose_kernel(
    logits_ptr, bias_ptr, load_ptr, threshold_ptr, weight_ptr, expert_ptr, state_ptr, stats_ptr,
    count_ptr, prob_ptr, square_ptr, T, length, tiles_per_sequence, num_tiles, state_size, scale,
    E: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr, SCORE: tl.constexpr, NORMALIZE: tl.constexpr,
    TILE_T: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Top-k, weights, and per tile: slots and summed shares of score per expert, squared lse.

    ``state_ptr``: numbers for load balancing, zeros but for the second, whether any expert is hot;
    one more program than there are tiles writes them. None: there is none. ``prob_ptr`` None: no
    balance loss.
    """
    tile, start, end = tile_of(T, length, tiles_per_sequence, TILE_T)
    if tile == num_tiles:
        _begin_balance(state_ptr, load_ptr, threshold_ptr, state_size, E, BLOCK_E)
        return
    e, k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    count_E = tl.zeros((BLOCK_E,), tl.int32)
    prob_E = tl.zeros((BLOCK_E,), tl.float32)
    square = tl.zeros((), tl.float32)
    for first in range(0, TILE_T, BLOCK_T):
        t = start + first + tl.arange(0, BLOCK_T)
        inside_T = t < end
        logits_TE = load_logits(logits_ptr, t, e, inside_T, E)
        largest_T, total_T = stats_of(logits_TE)
        lse_T = largest_T + tl.log(total_T)
        square += tl.sum(tl.where(inside_T, lse_T * lse_T, 0.0), axis=0)
        tl.store(stats_ptr + t, largest_T, mask=inside_T)
        tl.store(stats_ptr + T + t, total_T, mask=inside_T)
        score_TE = scores_of(logits_TE, largest_T[:, None], total_T[:, None], SCORE)
        select_TE = score_TE
        if bias_ptr is not None:
            select_TE += tl.load(bias_ptr + e, mask=e < E, other=0.0)[None, :]
        value_TE = tl.where((e < E)[None, :], ordered_of(select_TE), LOWEST_32)
        if GROUPS > 1:
            key_TE = tl.where((e < E)[None, :], keys_of(select_TE, e[None, :], BLOCK_E), LOWEST)
            key_TE = open_groups(
                key_TE, e, E, GROUPS, TOP_GROUPS, GROUP_TOP, BLOCK_T, BLOCK_E, BLOCK_G
            )
            value_TE = tl.where(key_TE == LOWEST, LOWEST_32, value_TE)
        index_TK, left_TE = top_indices(value_TE, e, TOP_K, BLOCK_T, BLOCK_E, BLOCK_K)
        picked_TE = inside_T[:, None] & (left_TE != value_TE)
        count_E += tl.sum(picked_TE.to(tl.int32), axis=0)
        if prob_ptr is not None:
            if SCORE == "sigmoid":
                sum_T = tl.maximum(tl.sum(score_TE, axis=1), TINY)
                score_TE = tl.div_rn(score_TE, tl.broadcast_to(sum_T[:, None], score_TE.shape))
            prob_E += tl.sum(tl.where(inside_T[:, None], score_TE, 0.0), axis=0)
        inside_TK = inside_T[:, None] & (k < TOP_K)[None, :]
        score_TK = slot_scores(logits_ptr, t, index_TK, largest_T, total_T, inside_TK, E, SCORE)
        slot_TK = t[:, None] * TOP_K + k[None, :]
        tl.store(weight_ptr + slot_TK, weights_of(score_TK, scale, NORMALIZE), mask=inside_TK)
        tl.store(expert_ptr + slot_TK, index_TK.to(tl.int64), mask=inside_TK)
    bins = e.to(tl.int64) * num_tiles + tile
    tl.store(count_ptr + bins, count_E, mask=e < E)
    if prob_ptr is not None:
        tl.store(prob_ptr + bins, prob_E, mask=e < E)
    tl.store(square_ptr + tile, square)


@triton.jit(do_not_specialize=["T", "length"])
def moe_route_bwd_kernel(
    logits_ptr, stats_ptr, expert_ptr, share_ptr, dweight_ptr, daux_ptr, dz_ptr, dlogits_ptr,
    T, length, scale, E: tl.constexpr, TOP_K: tl.constexpr, SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr, BY_SEQUENCE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradient of the logits through weights, balance loss and z loss; None: not asked for."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e, k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    inside_T = t < T
    inside_TE = inside_T[:, None] & (e < E)[None, :]
    logits_TE = load_logits(logits_ptr, t, e, inside_T, E)
    largest_T = tl.load(stats_ptr + t, mask=inside_T, other=0.0)
    total_T = tl.load(stats_ptr + T + t, mask=inside_T, other=1.0)
    score_TE = scores_of(logits_TE, largest_T[:, None], total_T[:, None], SCORE)
    dscore_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    if daux_ptr is not None:
        factor = tl.load(daux_ptr) * E / T.to(tl.float32)
        if BY_SEQUENCE:
            share = share_ptr + (t // length)[:, None] * E + e[None, :]
            slope_TE = factor * tl.load(share, mask=inside_TE, other=0.0)
        else:
            slope_E = factor * tl.load(share_ptr + e, mask=e < E, other=0.0)
            slope_TE = tl.broadcast_to(slope_E[None, :], score_TE.shape)
        if SCORE == "sigmoid":
            sum_T = tl.sum(score_TE, axis=1)
            safe_T = tl.maximum(sum_T, TINY)
            inner_T = tl.sum(slope_TE * score_TE, axis=1) / safe_T
            inner_T = tl.where(sum_T >= TINY, inner_T, 0.0)
            slope_TE = (slope_TE - inner_T[:, None]) / safe_T[:, None]
        else:  # what softmax subtracts below; twice, as slopes differ by less than they are large
            slope_TE -= tl.sum(slope_TE * score_TE, axis=1)[:, None]
        dscore_TE += slope_TE
    if dweight_ptr is not None:
        inside_TK = inside_T[:, None] & (k < TOP_K)[None, :]
        slot_TK = t[:, None] * TOP_K + k[None, :]
        index_TK = tl.load(expert_ptr + slot_TK, mask=inside_TK, other=-1).to(tl.int32)
        grad_TK = tl.load(dweight_ptr + slot_TK, mask=inside_TK, other=0.0) * scale
        if NORMALIZE:
            score_TK = slot_scores(logits_ptr, t, index_TK, largest_T, total_T, inside_TK, E, SCORE)
            sum_T = tl.sum(score_TK, axis=1)
            safe_T = tl.maximum(sum_T, TINY)
            inner_T = tl.sum(grad_TK * score_TK, axis=1) / safe_T
            inner_T = tl.where(sum_T >= TINY, inner_T, 0.0)
            grad_TK = (grad_TK - inner_T[:, None]) / safe_T[:, None]
        for slot in range(TOP_K):
            here = (k == slot)[None, :]
            index_T = tl.sum(tl.where(here, index_TK, 0), axis=1)
            grad_T = tl.sum(tl.where(here, grad_TK, 0.0), axis=1)
            dscore_TE += tl.where(e[None, :] == index_T[:, None], grad_T[:, None], 0.0)
    if SCORE == "softmax":
        inner_T = tl.sum(dscore_TE * score_TE, axis=1)
        dlogits_TE = score_TE * (dscore_TE - inner_T[:, None])
    else:
        dlogits_TE = dscore_TE * score_TE * (1.0 - score_TE)
    if dz_ptr is not None:
        prob_TE = scores_of(logits_TE, largest_T[:, None], total_T[:, None], "softmax")
        lse_T = largest_T + tl.log(total_T)
        dlogits_TE += prob_TE * (tl.load(dz_ptr) * 2.0 * lse_T / T.to(tl.float32))[:, None]
    out = dlogits_ptr + t[:, None] * E + e[None, :]
    tl.store(out, dlogits_TE.to(dlogits_ptr.dtype.element_ty), mask=inside_TE)
