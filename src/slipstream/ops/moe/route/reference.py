"""Routing in plain PyTorch: scores, groups, exact top-k, balance, weights, maps and losses.

Top-k is a stable descending sort, so a tie goes to the lower expert index, always.
"""

import torch

from slipstream.ops.check import compute_dtype
from slipstream.ops.moe.route.balance import rebalance
from slipstream.ops.moe.route.options import RouteOptions
from slipstream.ops.moe.routing import Routing


def route_reference(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    load_E: torch.Tensor | None,
    threshold: torch.Tensor | None,
    options: RouteOptions,
    share_E: torch.Tensor | None = None,
) -> Routing:
    """See ``route``."""
    logits = logits_TE.to(compute_dtype(logits_TE))
    score_TE = logits.softmax(-1) if options.score == "softmax" else logits.sigmoid()
    with torch.no_grad():
        select_TE = _selection(score_TE, bias_E, options)
        plain_TK = select_TE.sort(dim=1, descending=True, stable=True)[1][:, : options.top_k]
        expert_TK = plain_TK
        if threshold is not None and load_E is not None:
            expert_TK = rebalance(
                select_TE, score_TE, plain_TK, load_E, threshold, options.depth, options.mode
            )
        order_N, position_N, offsets_E1 = _sort_by_expert(expert_TK, logits.shape[1])
        demand_E = _one_hot_count(plain_TK, logits.shape[1], 1).sum(0)
    weight_TK = score_TE.gather(1, expert_TK)
    if options.normalize:
        weight_TK = _normalized(weight_TK)
    return Routing(
        weight_TK=weight_TK * options.scale,
        expert_TK=expert_TK,
        offsets_E1=offsets_E1,
        order_N=order_N,
        position_N=position_N,
        demand_E=demand_E,
        rerouted=(expert_TK != plain_TK).sum(),
        aux_loss=_aux_loss(score_TE, plain_TK, options, share_E),
        z_loss=_mean(torch.logsumexp(logits, -1).square()),
    )


def sort_reference(expert_TK: torch.Tensor, weight_TK: torch.Tensor, num_experts: int) -> Routing:
    """See ``routing_from``."""
    order_N, position_N, offsets_E1 = _sort_by_expert(expert_TK, num_experts)
    zero = torch.zeros((), device=expert_TK.device)
    return Routing(
        weight_TK=weight_TK,
        expert_TK=expert_TK,
        offsets_E1=offsets_E1,
        order_N=order_N,
        position_N=position_N,
        demand_E=offsets_E1.diff().to(torch.int64),
        rerouted=zero.to(torch.int64),
        aux_loss=zero,
        z_loss=zero.clone(),
    )


def _selection(
    score_TE: torch.Tensor, bias_E: torch.Tensor | None, options: RouteOptions
) -> torch.Tensor:
    select_TE = score_TE if bias_E is None else score_TE + bias_E
    if options.num_groups == 1:
        return select_TE
    per_group = select_TE.shape[1] // options.num_groups
    grouped = select_TE.view(-1, options.num_groups, per_group)
    group_score = grouped.sort(dim=2, descending=True)[0][:, :, : options.group_top].sum(2)
    kept = group_score.sort(dim=1, descending=True, stable=True)[1][:, : options.top_groups]
    allowed = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, kept, True)
    return grouped.masked_fill(~allowed[:, :, None], -torch.inf).flatten(1)


def _sort_by_expert(
    expert_TK: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # What is no expert sorts last.
    absent_TK = (expert_TK < 0) | (expert_TK >= num_experts)
    sorted_N, order_N = expert_TK.masked_fill(absent_TK, num_experts).flatten().sort(stable=True)
    rows = torch.arange(order_N.numel(), device=order_N.device)
    position_N = torch.empty_like(order_N).scatter_(0, order_N, rows)
    edges = torch.arange(num_experts + 1, device=order_N.device)
    return order_N, position_N, torch.searchsorted(sorted_N, edges, out_int32=True)


def _one_hot_count(expert_TK: torch.Tensor, num_experts: int, sequences: int) -> torch.Tensor:
    slots = expert_TK.reshape(sequences, -1)
    zeros = torch.zeros(sequences, num_experts, dtype=torch.int64, device=slots.device)
    return zeros.scatter_add_(1, slots, torch.ones_like(slots))


def _aux_loss(
    score_TE: torch.Tensor,
    expert_TK: torch.Tensor,
    options: RouteOptions,
    share_E: torch.Tensor | None,
) -> torch.Tensor:
    # E * sum_e(share of the slots that e gets * mean normalised score of e), per sequence.
    if options.aux == "none" or not score_TE.numel():
        return score_TE.new_zeros(())
    num_experts = score_TE.shape[1]
    sequences = options.num_sequences if options.aux == "sequence" else 1
    counts_SE = _one_hot_count(expert_TK, num_experts, sequences)
    share_SE = counts_SE / (expert_TK.numel() / sequences)
    if share_E is not None:
        share_SE = share_E.detach().to(score_TE.dtype)[None]
    prob_SE = _normalized(score_TE).view(sequences, -1, num_experts).mean(1)
    return num_experts * (share_SE * prob_SE).sum(1).mean()


def _normalized(score: torch.Tensor) -> torch.Tensor:
    # Sigmoid scores of one token can all underflow to zero: zeros then, not NaN.
    return score / score.sum(1, keepdim=True).clamp(min=torch.finfo(score.dtype).tiny)


def _mean(values: torch.Tensor) -> torch.Tensor:
    return values.sum() / max(1, values.numel())
