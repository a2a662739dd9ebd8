"""Bring expert rows back to their tokens: weigh, add residual and shared expert, once."""

from typing import Any

import torch

from slipstream.ops import check, dispatch, triton_support
from slipstream.ops.dispatch import Refusal
from slipstream.ops.moe import checks
from slipstream.ops.moe.combine.autograd import combine_gather
from slipstream.ops.moe.combine.fused import combine_triton
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
    Absent slots (rows from ``offsets_E1[E]`` on) add nothing and get zero gradients.
    Summed in fp32 in a fixed order: run-to-run bitwise equal. Raises ShapeError.
    """
    checks.routing_maps("combine", routing)
    tokens, top_k = routing.expert_TK.shape
    check.shape("combine", "y", y_ND, tokens * top_k, None)
    checks.floating("combine", y=y_ND)
    check_extras("combine", tokens, y_ND.shape[1], residual_TD, shared_TD)
    check.same_device(
        "combine", y=y_ND, routing=routing.order_N, residual=residual_TD, shared=shared_TD
    )
    return dispatch.call("moe_combine", y_ND, routing, residual_TD, shared_TD)


def check_extras(
    op: str,
    tokens: int,
    width: int,
    residual_TD: torch.Tensor | None,
    shared_TD: torch.Tensor | None,
) -> None:
    """Raise unless what is added to the output has its shape."""
    for name, extra in (("residual", residual_TD), ("shared", shared_TD)):
        if extra is not None:
            check.shape(op, name, extra, tokens, width)
    checks.floating(op, residual=residual_TD, shared=shared_TD)


def _refuse_triton(y_ND: torch.Tensor, *_: Any) -> Refusal | None:
    return triton_support.refusal(y_ND)


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    routing = route(torch.randn(16, 4, device=device), top_k=2)
    return (torch.randn(32, 8, device=device, dtype=dtype), routing, None, None), {}


dispatch.register(
    "moe_combine",
    ("triton", combine_triton, _refuse_triton),
    ("gather_sum", combine_gather, None),
    ("reference", combine_reference, None),
    example=_example,
)

__all__ = ["check_extras", "combine"]
