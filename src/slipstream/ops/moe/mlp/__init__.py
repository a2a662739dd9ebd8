"""Everything of an MoE layer after routing: experts, then combine, as one op."""

from typing import Any

import torch

from slipstream.ops import check, dispatch, triton_support
from slipstream.ops.activation import ALPHA, LIMIT
from slipstream.ops.dispatch import Refusal
from slipstream.ops.moe import checks
from slipstream.ops.moe.combine import check_extras
from slipstream.ops.moe.experts import (
    Accumulate,
    ExpertsOptions,
    Save,
    adding,
    check_accumulate,
)
from slipstream.ops.moe.experts.fused import moe_mlp_triton
from slipstream.ops.moe.experts.inputs import check_inputs
from slipstream.ops.moe.mlp.composed import moe_mlp_composed
from slipstream.ops.moe.route import route
from slipstream.ops.moe.routing import Routing


def moe_mlp(
    x_TD: torch.Tensor,
    w13_EPD: torch.Tensor,
    w2_EDF: torch.Tensor,
    routing: Routing,
    *,
    activation: str = "swiglu",
    b13_EP: torch.Tensor | None = None,
    b2_ED: torch.Tensor | None = None,
    interleaved: bool = False,
    alpha: float = ALPHA,
    limit: float = LIMIT,
    save: Save = "h",
    accumulate: Accumulate | None = None,
    residual_TD: torch.Tensor | None = None,
    shared_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """``combine(experts(x))``: everything of an MoE layer after routing, ``(T, D)``.

    Arguments are those of ``experts`` and ``combine``; the result has the dtype of ``x``, or
    autocast's. Deterministic: run-to-run bitwise equal. Raises ShapeError.
    """
    options = ExpertsOptions(
        activation=activation, interleaved=interleaved, alpha=alpha, limit=limit, save=save
    )
    check_inputs("moe_mlp", x_TD, w13_EPD, w2_EDF, b13_EP, b2_ED, routing, options)
    tokens, width = x_TD.shape
    check_extras("moe_mlp", tokens, width, residual_TD, shared_TD)
    check.same_device("moe_mlp", x=x_TD, residual=residual_TD, shared=shared_TD)
    check_accumulate("moe_mlp", w13_EPD, w2_EDF, accumulate)
    x_TD, precision = checks.follow_autocast(x_TD)
    with precision:
        return dispatch.call(
            "moe_mlp",
            x_TD,
            w13_EPD,
            w2_EDF,
            b13_EP,
            b2_ED,
            routing,
            residual_TD,
            shared_TD,
            options,
            accumulate=accumulate,
        )


def _refuse_triton(x_TD: torch.Tensor, *_: Any, **__: Any) -> Refusal | None:
    return triton_support.refusal(x_TD)


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    x_TD = torch.randn(16, 32, device=device, dtype=dtype)
    w13_EPD = torch.randn(4, 128, 32, device=device, dtype=dtype)
    w2_EDF = torch.randn(4, 32, 64, device=device, dtype=dtype)
    routing = route(torch.randn(16, 4, device=device), top_k=2)
    options = ExpertsOptions(activation="swiglu")
    return (x_TD, w13_EPD, w2_EDF, None, None, routing, None, None, options), {}


dispatch.register(
    "moe_mlp",
    ("triton", moe_mlp_triton, _refuse_triton),
    ("composed", adding(moe_mlp_composed), None),
    example=_example,
)

__all__ = ["moe_mlp"]
