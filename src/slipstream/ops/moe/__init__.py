"""Mixture of Experts in three ops: ``route``, ``experts``, ``combine``; ``moe_mlp`` chains two."""

import torch

from slipstream.ops.moe.combine import combine
from slipstream.ops.moe.experts import experts
from slipstream.ops.moe.route import route
from slipstream.ops.moe.routing import Routing


def moe_mlp(
    x_TD: torch.Tensor,
    w13_EPD: torch.Tensor,
    w2_EDF: torch.Tensor,
    routing: Routing,
    *,
    activation: str = "swiglu",
    residual_TD: torch.Tensor | None = None,
    shared_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """``combine(experts(x))``: everything of an MoE layer after routing, ``(T, D)``."""
    y_ND = experts(x_TD, w13_EPD, w2_EDF, routing, activation=activation)
    return combine(y_ND, routing, residual_TD=residual_TD, shared_TD=shared_TD)


__all__ = ["Routing", "combine", "experts", "moe_mlp", "route"]
