"""Bring expert rows back to their tokens: weigh, add residual and shared expert, once."""

from typing import Any

import torch

from slipstream.ops import check, dispatch
from slipstream.ops.moe.combine.autograd import combine_gather
from slipstream.ops.moe.combine.reference import combine_reference
from slipstream.ops.moe.route import route
from slipstream.ops.moe.routing import Routing


def combine(
    y_ND: torch.Tensor,
    routing: Routing,
    *,
    residual_TD: torch.Tensor | None = None,
    shared_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """``residual + shared + sum_k weight_TK[t, k] * y``, ``(T, D)`` in the dtype of ``y``.

    ``y_ND (N, D)``: rows sorted by expert, from ``experts``; ``residual_TD``, ``shared_TD (T, D)``.
    Summed in fp32 in a fixed order: run-to-run bitwise equal. Raises ShapeError.
    """
    tokens, top_k = routing.expert_TK.shape
    check.shape("combine", "y", y_ND, tokens * top_k, None)
    for name, extra in (("residual", residual_TD), ("shared", shared_TD)):
        if extra is not None:
            check.shape("combine", name, extra, tokens, y_ND.shape[1])
    check.same_device(
        "combine", y=y_ND, routing=routing.order_N, residual=residual_TD, shared=shared_TD
    )
    return dispatch.call("moe_combine", y_ND, routing, residual_TD, shared_TD)


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    routing = route(torch.randn(16, 4, device=device), top_k=2)
    return (torch.randn(32, 8, device=device, dtype=dtype), routing, None, None), {}


dispatch.register(
    "moe_combine",
    ("gather_sum", combine_gather, None),
    ("reference", combine_reference, None),
    example=_example,
)

__all__ = ["combine"]
