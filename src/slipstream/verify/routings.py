"""Random assignments of tokens to experts with a known shape of load, and plain expert MLPs."""

from itertools import pairwise
from typing import Literal

import torch

from slipstream.ops.moe import Routing
from slipstream.verify.cases.activation import EAGER, GATED, eager_gated

Load = Literal["random", "one-takes-all", "empty-experts", "absent"]


def draw_experts(
    generator: torch.Generator, tokens: int, num_experts: int, top_k: int, load: Load = "random"
) -> torch.Tensor:
    """``expert_TK``, distinct experts for each token.

    ``one-takes-all``: every first choice is the last expert; ``empty-experts``: odd ones get
    nothing; ``absent``: every third slot, and the whole first token, belong to nobody.
    """
    score_TE = torch.rand(tokens, num_experts, generator=generator)
    if load == "one-takes-all":
        score_TE[:, -1] += 1
    if load == "empty-experts":
        score_TE[:, 1::2] -= 1
    expert_TK = score_TE.topk(top_k, dim=1).indices
    if load == "absent":
        expert_TK.view(-1)[::3] = num_experts
        expert_TK[:1] = num_experts + 1
    return expert_TK


def routing_of(
    expert_TK: torch.Tensor, num_experts: int, weight_TK: torch.Tensor | None = None
) -> Routing:
    """The maps of ``expert_TK``, by a stable sort; nothing waits for the device."""
    sorted_N, order_N = expert_TK.flatten().clamp(max=num_experts).sort(stable=True)
    rows = torch.arange(order_N.numel(), device=order_N.device)
    edges = torch.arange(num_experts + 1, device=order_N.device)
    offsets_E1 = torch.searchsorted(sorted_N, edges, out_int32=True)
    zero = torch.zeros((), device=order_N.device)
    if weight_TK is None:
        weight_TK = torch.ones(expert_TK.shape, device=order_N.device)
    return Routing(
        weight_TK=weight_TK,
        expert_TK=expert_TK,
        offsets_E1=offsets_E1,
        order_N=order_N,
        position_N=torch.empty_like(order_N).scatter_(0, order_N, rows),
        demand_E=offsets_E1.diff().long(),
        rerouted=zero.long(),
        aux_loss=zero,
        z_loss=zero,
    )


def eager_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    expert: torch.Tensor,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    activation: str = "swiglu",
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> torch.Tensor:
    """A loop over experts in the dtype of ``x``; rows sorted by expert, zeros for absent slots."""
    routing = routing_of(expert, len(w2))
    rows_ND = x[routing.order_N // routing.top_k]
    edges = routing.offsets_E1.tolist()
    outputs = []
    for e, (start, stop) in enumerate(pairwise(edges)):
        h = rows_ND[start:stop] @ w13[e].to(x.dtype).T
        h = h if b13 is None else h + b13[e].to(x.dtype)
        if activation not in GATED:
            a = EAGER[activation](h)
        else:
            gate, up = (h[:, ::2], h[:, 1::2]) if interleaved else h.chunk(2, dim=-1)
            a = eager_gated(activation, gate, up, alpha, limit)
        y = a @ w2[e].to(x.dtype).T
        outputs.append(y if b2 is None else y + b2[e].to(x.dtype))
    return torch.cat([*outputs, torch.zeros_like(rows_ND[edges[-1] :])])


def eager_combine(
    y: torch.Tensor,
    weight: torch.Tensor,
    expert: torch.Tensor,
    num_experts: int,
    residual: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum in fp32 (fp64 for the truth), rounded once."""
    wide = torch.promote_types(y.dtype, torch.float32)
    position_N = routing_of(expert, num_experts).position_N
    slots_TKD = y[position_N].view(*expert.shape, y.shape[1]).to(wide)
    slots_TKD = slots_TKD.masked_fill((expert >= num_experts)[:, :, None], 0)
    out_TD = (slots_TKD * weight.to(wide)[:, :, None]).sum(1)
    for extra in (shared, residual):
        out_TD = out_TD if extra is None else out_TD + extra.to(wide)
    return out_TD.to(y.dtype)
