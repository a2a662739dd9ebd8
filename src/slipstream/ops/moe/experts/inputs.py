"""Validation of what ``experts`` and ``moe_mlp`` are given, once, at the public boundary."""

import torch

from slipstream.errors import ShapeError
from slipstream.ops import check
from slipstream.ops.activation import ALPHA, LIMIT, Activation, check_clamp
from slipstream.ops.moe import checks
from slipstream.ops.moe.experts.options import ExpertsOptions, Save
from slipstream.ops.moe.routing import Routing


def check_options(op: str, options: ExpertsOptions) -> None:
    """Raise unless the options name what exists and fit together."""
    check.choice(op, "activation", options.activation, Activation)
    check.choice(op, "save", options.save, Save)
    check_clamp(op, options.alpha, options.limit)
    for name, value, default in (("alpha", options.alpha, ALPHA), ("limit", options.limit, LIMIT)):
        if options.activation != "swiglu_clamped" and value != default:
            raise ShapeError(
                f"{op}: {name} = {value}, but {options.activation} has none; leave it out, or use "
                f"swiglu_clamped"
            )
    if options.interleaved and not options.gated:
        raise ShapeError(
            f"{op}: interleaved needs a gated activation, {options.activation} has no up rows"
        )


def check_inputs(
    op: str,
    x_TD: torch.Tensor,
    w13_EPD: torch.Tensor,
    w2_EDF: torch.Tensor,
    b13_EP: torch.Tensor | None,
    b2_ED: torch.Tensor | None,
    routing: Routing,
    options: ExpertsOptions,
) -> None:
    """Raise unless shapes, dtypes and devices of all tensors fit together."""
    check_options(op, options)
    check.shape(op, "w2", w2_EDF, None, None, None)
    checks.not_empty(op, "w2", w2_EDF)
    num_experts, width, hidden = w2_EDF.shape
    rows = hidden * (2 if options.gated else 1)
    check.shape(op, "w13", w13_EPD, num_experts, rows, width)
    if b13_EP is not None:
        check.shape(op, "b13", b13_EP, num_experts, rows)
    if b2_ED is not None:
        check.shape(op, "b2", b2_ED, num_experts, width)
    checks.routing_maps(op, routing, num_experts)
    check.shape(op, "x", x_TD, routing.expert_TK.shape[0], width)
    floats = {"x": x_TD, "w13": w13_EPD, "w2": w2_EDF, "b13": b13_EP, "b2": b2_ED}
    checks.floating(op, **floats)
    check.same_device(op, **floats, routing=routing.order_N)
