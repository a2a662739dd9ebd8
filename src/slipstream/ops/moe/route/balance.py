"""Load balancing inside routing: an expert over its capacity hands slots to the next-best expert.

Hot means a smoothed load above ``threshold`` times the mean; capacity is that multiple of the
mean number of slots. ``weight``: a hot expert sheds its weakest slots. ``causal``: while anything
is hot, every expert takes slots in token order and sheds the latest, so that a token's experts
depend on earlier tokens only. A shed slot proposes to its token's best expert that the token has
not chosen and that has room, in at most ``depth`` rounds; a slot nobody takes stays, so no token
is dropped. Everything is a sort, a sum or a mask of fixed shape: no host synchronisation.
"""

import torch

from slipstream.ops.moe.route.options import BalanceMode


def rebalance(
    select_TE: torch.Tensor,
    score_TE: torch.Tensor,
    expert_TK: torch.Tensor,
    load_E: torch.Tensor,
    threshold: torch.Tensor,
    depth: int,
    mode: BalanceMode = "weight",
) -> torch.Tensor:
    """``expert_TK`` with shed slots moved; equal to the input where no expert is hot.

    ``select_TE`` ranks candidates (-inf: not allowed), ``score_TE`` is the strength of a slot.
    """
    limit = threshold.double()
    # Sums of fp32 loads are exact in fp64: what is hot does not depend on the order of the sum.
    hot_E = load_E.double() > limit * (load_E.double().sum() / load_E.numel())
    slots = expert_TK.numel()
    capacity = (limit * slots / load_E.numel()).floor().clamp(1, max(1, slots)).long()
    if mode == "causal":
        moved_TK = _shed_latest(select_TE, expert_TK, capacity, depth)
        return torch.where(hot_E.any(), moved_TK, expert_TK)
    return _shed_weakest(select_TE, score_TE, expert_TK, hot_E, capacity, depth)


def _shed_weakest(
    select_TE: torch.Tensor,
    score_TE: torch.Tensor,
    expert_TK: torch.Tensor,
    hot_E: torch.Tensor,
    capacity: torch.Tensor,
    depth: int,
) -> torch.Tensor:
    num_experts = score_TE.shape[1]
    count_E = _count(expert_TK.flatten(), num_experts)
    rank_TK = rank_within(expert_TK, score_TE.gather(1, expert_TK), num_experts)
    shed_TK = hot_E[expert_TK] & (rank_TK >= capacity)
    room_E = (capacity - count_E).clamp(min=0)
    chosen_TE = _mark(score_TE, expert_TK)
    for _ in range(depth):
        open_TE = select_TE.masked_fill(chosen_TE | (room_E <= 0), -torch.inf)
        target_TK, valid_TK = _proposals(open_TE, shed_TK)
        strength_TK = score_TE.gather(1, target_TK).masked_fill(~valid_TK, -torch.inf)
        rank_TK = rank_within(target_TK, strength_TK, num_experts)
        taken_TK = valid_TK & (rank_TK < room_E[target_TK])
        expert_TK = torch.where(taken_TK, target_TK, expert_TK)
        room_E = room_E - _count(target_TK.flatten(), num_experts, taken_TK.flatten())
        chosen_TE = chosen_TE | _mark(score_TE, target_TK, taken_TK)
        shed_TK = shed_TK & ~taken_TK
    return expert_TK


def _shed_latest(
    select_TE: torch.Tensor, plain_TK: torch.Tensor, capacity: torch.Tensor, depth: int
) -> torch.Tensor:
    # Deferred acceptance with experts that prefer earlier tokens: what token t holds after a round
    # depends on tokens up to t only, since an expert's room for t is what they left.
    plain_TE = _mark(select_TE, plain_TK)
    expert_TK, shed_TK = plain_TK, torch.zeros_like(plain_TK, dtype=torch.bool)
    for last in [False] * depth + [True]:
        held_TE = _mark(select_TE, expert_TK, ~shed_TK)
        before_TE = held_TE.cumsum(0) - held_TE.long()
        shed_TK = shed_TK | (before_TE.gather(1, expert_TK) >= capacity)
        if last:
            break
        closed_TE = plain_TE | held_TE | (before_TE >= capacity)
        target_TK, valid_TK = _proposals(select_TE.masked_fill(closed_TE, -torch.inf), shed_TK)
        expert_TK = torch.where(valid_TK, target_TK, expert_TK)
        shed_TK = shed_TK & ~valid_TK
    return torch.where(shed_TK, plain_TK, expert_TK)


def rank_within(group_TK: torch.Tensor, strength_TK: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Rank of each slot in its group, 0 the strongest; ties go to the earlier flat slot."""
    group_N, strength_N = group_TK.flatten(), strength_TK.flatten()
    by_strength = strength_N.argsort(descending=True, stable=True)
    order = by_strength[group_N[by_strength].argsort(stable=True)]
    edges = torch.arange(num_groups, device=group_N.device)
    starts = torch.searchsorted(group_N[order].contiguous(), edges)
    ranks = torch.arange(group_N.numel(), device=group_N.device) - starts[group_N[order]]
    return torch.empty_like(ranks).scatter_(0, order, ranks).view_as(group_TK)


def _proposals(open_TE: torch.Tensor, shed_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The j-th shed slot of a token proposes to the token's j-th best open expert, so that no two
    # slots of one token can end at the same expert.
    slots = min(shed_TK.shape[1], open_TE.shape[1])
    best_TE, index_TE = open_TE.sort(dim=1, descending=True, stable=True)
    nth_TK = (shed_TK.cumsum(1) - 1).clamp(0, slots - 1)
    valid_TK = shed_TK & (best_TE.gather(1, nth_TK) > -torch.inf)
    return index_TE.gather(1, nth_TK), valid_TK


def _count(index: torch.Tensor, size: int, weight: torch.Tensor | None = None) -> torch.Tensor:
    ones = torch.ones_like(index) if weight is None else weight.to(index.dtype)
    return torch.zeros(size, dtype=index.dtype, device=index.device).scatter_add_(0, index, ones)


def _mark(
    like_TE: torch.Tensor, index_TK: torch.Tensor, on_TK: torch.Tensor | None = None
) -> torch.Tensor:
    hits = torch.zeros(like_TE.shape, dtype=torch.int64, device=like_TE.device)
    on = torch.ones_like(index_TK) if on_TK is None else on_TK.to(torch.int64)
    return hits.scatter_add_(1, index_TK, on) > 0
