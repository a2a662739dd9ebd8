"""What both balance kernels share: the barrier, the ranking of experts, the outcome.

``S`` is a ``balance_launch.Spec``; what goes on to another function is first named, as Triton 3.6
passes constants by name only. Nothing is stored where another thread may still have to load.
"""

import triton
import triton.language as tl

from slipstream.ops.moe.route.kernels import (
    LOWEST,
    LOWEST_32,
    keys_of,
    load_logits,
    open_groups,
    ordered_of,
    scores_of,
    slot_scores,
    weights_of,
)

LATEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def grid_barrier(ticket_ptr, goal):
    """Wait for all programs, which must be resident at once; returns the tickets drawn so far."""
    goal = arrive(ticket_ptr, goal)
    wait(ticket_ptr, goal)
    return goal


@triton.jit
def arrive(ticket_ptr, goal):
    """The first half of a barrier: what this program has stored so far is for the others."""
    tl.debug_barrier()
    tl.atomic_add(ticket_ptr, 1, sem="release", scope="gpu")
    return goal + tl.num_programs(0)


@triton.jit
def wait(ticket_ptr, goal):
    """The second half: until all have arrived."""
    while tl.atomic_add(ticket_ptr, 0, sem="acquire", scope="gpu") < goal:
        pass
    tl.debug_barrier()


@triton.jit
def capacity_of(threshold_ptr, slots, S: tl.constexpr):
    """The slots that each expert may carry."""
    most = slots.to(tl.float64)
    capacity = tl.floor(tl.load(threshold_ptr).to(tl.float64) * most / S.E)
    return tl.minimum(tl.maximum(capacity, 1.0), most).to(tl.int32)


@triton.jit
def strength_of(logits_ptr, stats_ptr, t, expert, inside, T, S: tl.constexpr):
    """The score of slots as an integer of the same order; scores are never negative."""
    SCORE: tl.constexpr = S.SCORE
    logits = tl.load(logits_ptr + t * S.E + expert, mask=inside, other=0.0).to(tl.float32)
    largest = tl.load(stats_ptr + t, mask=inside, other=0.0)
    total = tl.load(stats_ptr + T + t, mask=inside, other=1.0)
    return strength_bits(scores_of(logits, largest, total, SCORE))


@triton.jit
def strength_bits(score):
    """Scores as integers of the same order, below LATEST."""
    return tl.minimum(score.to(tl.int32, bitcast=True) & LATEST, LATEST - 1)


@triton.jit
def key_of(strength, t):
    """Stronger slots above, earlier tokens above later ones of the same strength."""
    return (strength.to(tl.int64) << 32) | earliness(t).to(tl.int64)


@triton.jit
def earliness(t):
    """Larger for earlier tokens, and below LATEST."""
    return 0x7FFFFFFE - t


@triton.jit
def ranked(logits_ptr, stats_ptr, bias_ptr, t, e, inside_T, T, S: tl.constexpr):
    """int32 in the order in which tokens prefer experts, LOWEST_32: not allowed; and the scores."""
    E: tl.constexpr = S.E
    SCORE: tl.constexpr = S.SCORE
    GROUPS: tl.constexpr = S.GROUPS
    TOP_GROUPS: tl.constexpr = S.TOP_GROUPS
    GROUP_TOP: tl.constexpr = S.GROUP_TOP
    BLOCK_T: tl.constexpr = S.BLOCK_T
    BLOCK_E: tl.constexpr = S.BLOCK_E
    BLOCK_G: tl.constexpr = S.BLOCK_G
    logits_TE = load_logits(logits_ptr, t, e, inside_T, E)
    largest_T = tl.load(stats_ptr + t, mask=inside_T, other=0.0)
    total_T = tl.load(stats_ptr + T + t, mask=inside_T, other=1.0)
    score_TE = scores_of(logits_TE, largest_T[:, None], total_T[:, None], SCORE)
    select_TE = score_TE
    if bias_ptr is not None:
        select_TE += tl.load(bias_ptr + e, mask=e < E, other=0.0)[None, :]
    value_TE = tl.where((e < E)[None, :], ordered_of(select_TE), LOWEST_32)
    if GROUPS > 1:
        key_TE = tl.where((e < E)[None, :], keys_of(select_TE, e[None, :], BLOCK_E), LOWEST)
        key_TE = open_groups(key_TE, e, E, GROUPS, TOP_GROUPS, GROUP_TOP, BLOCK_T, BLOCK_E, BLOCK_G)
        value_TE = tl.where(key_TE == LOWEST, LOWEST_32, value_TE)
    return value_TE, score_TE


@triton.jit
def beyond_plain(value_TE, e, last_T):
    """``value_TE`` without plain top-k: what ranks above its last expert, ``last_T``, and that."""
    last_TE = e[None, :] == last_T[:, None]
    least_T = tl.max(tl.where(last_TE, value_TE, LOWEST_32), axis=1)[:, None]
    plain_TE = (value_TE > least_T) | ((value_TE == least_T) & (e[None, :] <= last_T[:, None]))
    return tl.where(plain_TE, LOWEST_32, value_TE)


@triton.jit
def keep_counts(count_ptr, plain_count_ptr, num_tiles, S: tl.constexpr):
    """A copy of the counts of plain top-k, each program its share."""
    BLOCK: tl.constexpr = 1024
    step = tl.num_programs(0) * BLOCK
    for first in range(tl.program_id(0) * BLOCK, S.E * num_tiles, step):
        i = first + tl.arange(0, BLOCK)
        mask = i < S.E * num_tiles
        tl.store(plain_count_ptr + i, tl.load(count_ptr + i, mask=mask), mask=mask)


@triton.jit
def report(
    logits_ptr, stats_ptr, now_ptr, expert_ptr, weight_ptr, count_ptr, rerouted_ptr, start, end,
    T, length, tiles_per_sequence, num_tiles, scale, S: tl.constexpr,
):  # fmt: skip
    """Experts, weights and counts of the tokens that moved; ``now`` below 0: the slot stays."""
    E: tl.constexpr = S.E
    SCORE: tl.constexpr = S.SCORE
    NORMALIZE: tl.constexpr = S.NORMALIZE
    k = tl.arange(0, S.BLOCK_K)
    total = tl.zeros((), tl.int32)
    for first in range(start, end, S.BLOCK_S):
        t = first + tl.arange(0, S.BLOCK_S).to(tl.int64)
        inside_TK = (t < end)[:, None] & (k < S.TOP_K)[None, :]
        slot_TK = t[:, None] * S.TOP_K + k[None, :]
        plain_TK = tl.load(expert_ptr + slot_TK, mask=inside_TK, other=0).to(tl.int32)
        now_TK = tl.load(now_ptr + slot_TK, mask=inside_TK, other=-1)
        now_TK = tl.where(now_TK < 0, plain_TK, now_TK)
        moved_TK = now_TK != plain_TK
        moved_T = tl.sum(moved_TK.to(tl.int32), axis=1)
        total += tl.sum(moved_T, axis=0)
        tl.debug_barrier()
        tl.store(expert_ptr + slot_TK, now_TK.to(tl.int64), mask=moved_TK)
        largest_T = tl.load(stats_ptr + t, mask=t < end, other=0.0)
        total_T = tl.load(stats_ptr + T + t, mask=t < end, other=1.0)
        score_TK = slot_scores(logits_ptr, t, now_TK, largest_T, total_T, inside_TK, E, SCORE)
        weight_TK = weights_of(score_TK, scale, NORMALIZE)
        tl.store(weight_ptr + slot_TK, weight_TK, mask=inside_TK & (moved_T > 0)[:, None])
        sequence = t // length
        tile = sequence * tiles_per_sequence + (t - sequence * length) // S.TILE_T
        from_TK = plain_TK.to(tl.int64) * num_tiles + tile[:, None]
        to_TK = now_TK.to(tl.int64) * num_tiles + tile[:, None]
        tl.atomic_add(count_ptr + from_TK, -1, mask=moved_TK, sem="relaxed")
        tl.atomic_add(count_ptr + to_TK, 1, mask=moved_TK, sem="relaxed")
    if total > 0:
        tl.atomic_add(rerouted_ptr, total.to(tl.int64), sem="relaxed")
