"""The expert MLPs as a plain loop over experts: the truth to test against, any dtype."""

from itertools import pairwise

import torch

from slipstream.ops.activation.reference import activation_reference
from slipstream.ops.check import compute_dtype
from slipstream.ops.moe.routing import Routing


def experts_reference(
    x_TD: torch.Tensor,
    w13_EPD: torch.Tensor,
    w2_EDF: torch.Tensor,
    routing: Routing,
    gating: str,
    gated: bool,
) -> torch.Tensor:
    """Rows sorted by expert ``(N, D)``; reads the offsets on the host."""
    wide = compute_dtype(x_TD)
    edges = routing.offsets_E1.tolist()
    rows_ND = x_TD[routing.order_N // routing.top_k].to(wide)
    outputs = [rows_ND[:0]]
    for expert, (start, stop) in enumerate(pairwise(edges)):
        h = rows_ND[start:stop] @ w13_EPD[expert].to(wide).T
        gate, up = h.chunk(2, dim=-1) if gated else (h, None)
        outputs.append(activation_reference(gate, up, gating) @ w2_EDF[expert].to(wide).T)
    return torch.cat(outputs).to(x_TD.dtype)
