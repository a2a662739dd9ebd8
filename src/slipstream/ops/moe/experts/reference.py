"""The expert MLPs as a plain loop over experts: the truth to test against, any dtype."""

from itertools import pairwise

import torch

from slipstream.ops.activation.reference import activation_reference
from slipstream.ops.check import compute_dtype
from slipstream.ops.moe.experts.options import ExpertsOptions
from slipstream.ops.moe.routing import Routing


def experts_reference(
    x_TD: torch.Tensor,
    w13_EPD: torch.Tensor,
    w2_EDF: torch.Tensor,
    b13_EP: torch.Tensor | None,
    b2_ED: torch.Tensor | None,
    routing: Routing,
    options: ExpertsOptions,
) -> torch.Tensor:
    """Rows sorted by expert ``(N, D)``, zeros for absent slots; reads the offsets on the host."""
    wide = compute_dtype(x_TD)
    edges = routing.offsets_E1.tolist()
    rows_ND = x_TD[routing.order_N // routing.top_k].to(wide)
    outputs = []
    for expert, (start, stop) in enumerate(pairwise(edges)):
        h = rows_ND[start:stop] @ w13_EPD[expert].to(wide).T
        if b13_EP is not None:
            h = h + b13_EP[expert].to(wide)
        gate, up = options.split(h)
        a = activation_reference(gate, up, options.gating, options.alpha, options.limit)
        y = a @ w2_EDF[expert].to(wide).T
        outputs.append(y if b2_ED is None else y + b2_ED[expert].to(wide))
    outputs.append(torch.zeros_like(rows_ND[edges[-1] :]))
    return torch.cat(outputs).to(x_TD.dtype)
