"""The MLPs of all experts over tokens sorted by expert, for any token counts."""

from typing import Any

import torch

from slipstream.ops import dispatch, triton_support
from slipstream.ops.activation import ALPHA, LIMIT
from slipstream.ops.dispatch import Refusal
from slipstream.ops.moe import checks
from slipstream.ops.moe.experts.accumulate import Accumulate, adding, check_accumulate
from slipstream.ops.moe.experts.autograd import experts_grouped
from slipstream.ops.moe.experts.fused import experts_triton
from slipstream.ops.moe.experts.grouped import refuse_grouped
from slipstream.ops.moe.experts.inputs import check_inputs
from slipstream.ops.moe.experts.options import ExpertsOptions, Save
from slipstream.ops.moe.experts.reference import experts_reference
from slipstream.ops.moe.route import route
from slipstream.ops.moe.routing import Routing


def experts(
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
) -> torch.Tensor:
    """Run every token through its experts; returns rows sorted by expert, ``(N, D)``, N = T*K.

    ``x_TD (T, D)``; ``w13_EPD (E, P, D)`` with P = 2F for a gated activation, gate rows before up
    rows or alternating (``interleaved``), and P = F otherwise; ``w2_EDF (E, D, F)``; biases
    ``b13_EP (E, P)`` and ``b2_ED (E, D)``. Weights may be transposed views. They are cast to the
    dtype of ``x``, their gradients come back in theirs; under autocast ``x`` is cast first.
    ``alpha`` and ``limit`` belong to ``swiglu_clamped``. ``save``: backward keeps x and the
    pre-activation, or x alone and computes the pre-activation again.
    ``accumulate``: fp32 buffers shaped like ``w13`` and ``w2`` to which their gradients are added
    in place of ``.grad``; not under ``torch.compile``.
    An expert without tokens gets zero gradients; rows of absent slots are undefined.
    Accumulates in fp32. Raises ShapeError.
    """
    options = ExpertsOptions(
        activation=activation, interleaved=interleaved, alpha=alpha, limit=limit, save=save
    )
    check_inputs("experts", x_TD, w13_EPD, w2_EDF, b13_EP, b2_ED, routing, options)
    check_accumulate("experts", w13_EPD, w2_EDF, accumulate)
    x_TD, precision = checks.follow_autocast(x_TD)
    with precision:
        return dispatch.call(
            "moe_experts", x_TD, w13_EPD, w2_EDF, b13_EP, b2_ED, routing, options,
            accumulate=accumulate,
        )  # fmt: skip


def _refuse_triton(x_TD: torch.Tensor, *_: Any, **__: Any) -> Refusal | None:
    return triton_support.refusal(x_TD)


def _refuse_grouped(x_TD: torch.Tensor, *_: Any, **__: Any) -> Refusal | None:
    return refuse_grouped(x_TD)


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    x_TD = torch.randn(16, 32, device=device, dtype=dtype)
    w13_EPD = torch.randn(4, 128, 32, device=device, dtype=dtype)
    w2_EDF = torch.randn(4, 32, 64, device=device, dtype=dtype)
    routing = route(torch.randn(16, 4, device=device), top_k=2)
    options = ExpertsOptions(activation="swiglu")
    return (x_TD, w13_EPD, w2_EDF, None, None, routing, options), {}


dispatch.register(
    "moe_experts",
    ("triton", experts_triton, _refuse_triton),
    ("grouped_mm", adding(experts_grouped), _refuse_grouped),
    ("reference", adding(experts_reference), None),
    example=_example,
)

__all__ = ["Accumulate", "ExpertsOptions", "Save", "adding", "check_accumulate", "experts"]
