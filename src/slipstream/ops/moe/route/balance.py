"""Load balancing inside routing: a hot expert sheds its weakest slots to the next-best expert.

Hot means a smoothed load above ``threshold`` times the mean. A hot expert keeps its strongest
``floor(threshold * N / E)`` slots (ties: the earlier token); each shed slot proposes to its token's
best expert that the token has not chosen and that has room, at most ``depth`` times; an expert with
more proposals than room takes the strongest. A slot nobody takes stays, so no token is dropped.
Everything is a sort or a mask of fixed shape: deterministic, without host synchronisation.
"""

import torch

from slipstream.ops.check import compute_dtype


def rebalance(
    select_TE: torch.Tensor,
    score_TE: torch.Tensor,
    expert_TK: torch.Tensor,
    load_E: torch.Tensor,
    threshold: torch.Tensor,
    depth: int,
) -> torch.Tensor:
    """``expert_TK`` with shed slots moved; equal to the input where no expert is hot.

    ``select_TE`` ranks candidates (-inf: not allowed), ``score_TE`` is the strength of a slot.
    """
    num_experts = score_TE.shape[1]
    capacity = (threshold * (expert_TK.numel() / num_experts)).floor().clamp(min=1)
    load_E = load_E.to(compute_dtype(load_E))
    hot_E = load_E > threshold * load_E.mean()
    count_E = _count(expert_TK.flatten(), num_experts)
    rank_TK = rank_within(expert_TK, score_TE.gather(1, expert_TK), num_experts)
    shed_TK = hot_E[expert_TK] & (rank_TK >= capacity)
    room_E = (capacity - count_E).clamp(min=0)
    chosen_TE = torch.zeros_like(score_TE, dtype=torch.bool).scatter(1, expert_TK, True)
    for _ in range(depth):
        open_TE = select_TE.masked_fill(chosen_TE | (room_E <= 0), -torch.inf)
        target_TK, valid_TK = _proposals(open_TE, shed_TK)
        strength_TK = score_TE.gather(1, target_TK).masked_fill(~valid_TK, -torch.inf)
        rank_TK = rank_within(target_TK, strength_TK, num_experts)
        taken_TK = valid_TK & (rank_TK < room_E[target_TK])
        expert_TK = torch.where(taken_TK, target_TK, expert_TK)
        room_E = room_E - _count(target_TK.flatten(), num_experts, taken_TK.flatten())
        chosen_TE = chosen_TE | _mark(chosen_TE, target_TK, taken_TK)
        shed_TK = shed_TK & ~taken_TK
    return expert_TK


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


def _mark(like_TE: torch.Tensor, index_TK: torch.Tensor, on_TK: torch.Tensor) -> torch.Tensor:
    hits = torch.zeros(like_TE.shape, dtype=torch.int64, device=like_TE.device)
    return hits.scatter_add_(1, index_TK, on_TK.to(torch.int64)) > 0
