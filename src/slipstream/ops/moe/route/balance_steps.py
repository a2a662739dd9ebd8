"""What both balance kernels share: the barrier, what is hot, the ranking of experts, the outcome.

``S`` is a ``balance_launch.Spec``; what goes on to another function is first named, as Triton 3.6
passes constants by name only. Nothing is stored where another thread may still have to load.
"""

import triton
import triton.language as tl

from slipstream.ops.moe.route.kernels import (
    LOWEST,
    keys_of,
    load_logits,
    open_groups,
    scores_of,
    slot_scores,
    weights_of,
)


@triton.jit
def grid_barrier(ticket_ptr, goal):
    """Wait for all programs, which must be resident at once; returns the tickets drawn so far."""
    goal += tl.num_programs(0)
    tl.debug_barrier()
    tl.atomic_add(ticket_ptr, 1, sem="release", scope="gpu")
    while tl.atomic_add(ticket_ptr, 0, sem="acquire", scope="gpu") < goal:
        pass
    tl.debug_barrier()
    return goal


@triton.jit
def hot_and_capacity(load_ptr, threshold_ptr, slots, S: tl.constexpr):
    """How many experts are hot, the load above which one is, and the slots each may carry."""
    e = tl.arange(0, S.BLOCK_E)
    load_E = tl.load(load_ptr + e, mask=e < S.E, other=0).to(tl.float64)
    threshold = tl.load(threshold_ptr).to(tl.float64)
    limit = threshold * (tl.sum(load_E, axis=0) / S.E)
    most = slots.to(tl.float64)
    capacity = tl.minimum(tl.maximum(tl.floor(threshold * most / S.E), 1.0), most)
    hot = tl.sum(((load_E > limit) & (e < S.E)).to(tl.int32), axis=0)
    return hot, limit, capacity.to(tl.int32)


@triton.jit
def ranked(logits_ptr, stats_ptr, bias_ptr, t, e, inside_T, T, S: tl.constexpr):
    """Keys by which a token ranks experts, those of the choice; LOWEST: not allowed."""
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
    select_TE = scores_of(logits_TE, largest_T[:, None], total_T[:, None], SCORE)
    if bias_ptr is not None:
        select_TE += tl.load(bias_ptr + e, mask=e < E, other=0.0)[None, :]
    key_TE = tl.where((e < E)[None, :], keys_of(select_TE, e[None, :], BLOCK_E), LOWEST)
    if GROUPS > 1:
        key_TE = open_groups(key_TE, e, E, GROUPS, TOP_GROUPS, GROUP_TOP, BLOCK_T, BLOCK_E, BLOCK_G)
    return key_TE


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
    """Experts, weights and counts of the tokens that moved; ``now`` -1: the slot stays."""
    E: tl.constexpr = S.E
    SCORE: tl.constexpr = S.SCORE
    NORMALIZE: tl.constexpr = S.NORMALIZE
    k = tl.arange(0, S.BLOCK_K)
    total = tl.zeros((), tl.int32)
    for first in range(start, end, S.BLOCK_T):
        t = first + tl.arange(0, S.BLOCK_T).to(tl.int64)
        inside_TK = (t < end)[:, None] & (k < S.TOP_K)[None, :]
        slot_TK = t[:, None] * S.TOP_K + k[None, :]
        plain_TK = tl.load(expert_ptr + slot_TK, mask=inside_TK, other=0).to(tl.int32)
        now_TK = tl.load(now_ptr + slot_TK, mask=inside_TK, other=-1)
        now_TK = tl.where(now_TK < 0, plain_TK, now_TK)
        moved_TK = now_TK != plain_TK
        moved_T = tl.sum(moved_TK.to(tl.int32), axis=1)
        moved = tl.sum(moved_T, axis=0)
        tl.debug_barrier()
        if moved > 0:
            total += moved
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
