"""Weighted sum of the expert rows of each token, in plain PyTorch."""

import torch

from slipstream.ops.check import compute_dtype
from slipstream.ops.moe.routing import Routing


def combine_reference(
    y_ND: torch.Tensor,
    routing: Routing,
    residual_TD: torch.Tensor | None,
    shared_TD: torch.Tensor | None,
) -> torch.Tensor:
    """``residual + shared + sum_k weight[t, k] * y[row of slot (t, k)]``, rounded once."""
    wide = compute_dtype(y_ND)
    present_N = routing.position_N < routing.offsets_E1[-1]
    slots_ND = torch.where(present_N[:, None], y_ND[routing.position_N].to(wide), 0)
    slots_TKD = slots_ND.view(*routing.expert_TK.shape, y_ND.shape[1])
    out_TD = (slots_TKD * routing.weight_TK.to(wide)[:, :, None]).sum(1)
    for extra in (shared_TD, residual_TD):
        if extra is not None:
            out_TD = out_TD + extra.to(wide)
    return out_TD.to(y_ND.dtype)
