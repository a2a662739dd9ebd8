"""The MoE MLP as two ops, each with the implementation that dispatch finds for it."""

import torch

from slipstream.ops import dispatch
from slipstream.ops.moe.experts.options import ExpertsOptions
from slipstream.ops.moe.routing import Routing


def moe_mlp_composed(
    x_TD: torch.Tensor,
    w13_EPD: torch.Tensor,
    w2_EDF: torch.Tensor,
    b13_EP: torch.Tensor | None,
    b2_ED: torch.Tensor | None,
    routing: Routing,
    residual_TD: torch.Tensor | None,
    shared_TD: torch.Tensor | None,
    options: ExpertsOptions,
) -> torch.Tensor:
    """``moe_combine`` of ``moe_experts``."""
    y_ND = dispatch.call("moe_experts", x_TD, w13_EPD, w2_EDF, b13_EP, b2_ED, routing, options)
    return dispatch.call("moe_combine", y_ND, routing, residual_TD, shared_TD)
