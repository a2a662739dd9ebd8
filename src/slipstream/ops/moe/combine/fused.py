"""The Triton path of ``combine``, as custom ops that ``torch.compile`` treats as one step each.

Triton is imported when an op first runs, so that importing Slipstream does not need it.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from slipstream.ops.custom import custom_op
from slipstream.ops.moe.combine.extras import distinct
from slipstream.ops.moe.routing import Routing


def combine_triton(
    y_ND: torch.Tensor,
    routing: Routing,
    residual_TD: torch.Tensor | None,
    shared_TD: torch.Tensor | None,
) -> torch.Tensor:
    """Same sum as the reference, slots added in order k = 0 .. K-1, then shared, then residual."""
    weight_TK = routing.weight_TK.to(torch.float32)
    residual_TD, shared_TD = distinct(y_ND, residual_TD, shared_TD)
    maps = routing.position_N, routing.offsets_E1
    return _Combine.apply(y_ND, weight_TK, residual_TD, shared_TD, *maps)


@custom_op("moe_combine")
def moe_combine(
    y_ND: torch.Tensor,
    weight_TK: torch.Tensor,
    shared_TD: torch.Tensor | None,
    residual_TD: torch.Tensor | None,
    position_N: torch.Tensor,
    offsets_E1: torch.Tensor,
) -> torch.Tensor:
    """Weighted sum of the rows of each token plus what else is given, (T, D)."""
    from slipstream.ops.moe.experts import launch  # noqa: PLC0415

    layout = launch.Layout.of_slots(position_N, offsets_E1, weight_TK.shape[1])
    y_ND, weight_TK = launch.aligned(y_ND), weight_TK.contiguous()
    return launch.gather_sum(y_ND, weight_TK, shared_TD, residual_TD, layout)


@moe_combine.register_fake
def _(
    y_ND: torch.Tensor,
    weight_TK: torch.Tensor,
    shared_TD: torch.Tensor | None,
    residual_TD: torch.Tensor | None,
    position_N: torch.Tensor,
    offsets_E1: torch.Tensor,
) -> torch.Tensor:
    return y_ND.new_empty(weight_TK.shape[0], y_ND.shape[1])


@custom_op("moe_combine_backward")
def moe_combine_backward(
    dout_TD: torch.Tensor,
    y_ND: torch.Tensor,
    weight_TK: torch.Tensor,
    position_N: torch.Tensor,
    offsets_E1: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the rows, zero at absent slots, and of the weights."""
    from slipstream.ops.moe.experts import launch  # noqa: PLC0415

    layout = launch.Layout.of_slots(position_N, offsets_E1, weight_TK.shape[1])
    dout_TD, weight_TK = launch.aligned(dout_TD), weight_TK.contiguous()
    dy_ND = launch.spread_rows(dout_TD, weight_TK, layout, zero=True)
    return dy_ND, launch.slot_dots(dout_TD, launch.aligned(y_ND), layout)


@moe_combine_backward.register_fake
def _(
    dout_TD: torch.Tensor,
    y_ND: torch.Tensor,
    weight_TK: torch.Tensor,
    position_N: torch.Tensor,
    offsets_E1: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(y_ND), torch.empty_like(weight_TK)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y_ND: torch.Tensor,
        weight_TK: torch.Tensor,
        residual_TD: torch.Tensor | None,
        shared_TD: torch.Tensor | None,
        position_N: torch.Tensor,
        offsets_E1: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(y_ND, weight_TK, position_N, offsets_E1)
        ctx.extras = [None if t is None else t.dtype for t in (residual_TD, shared_TD)]
        return moe_combine(y_ND, weight_TK, shared_TD, residual_TD, position_N, offsets_E1)

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (dout_TD,) = grads
        dy_ND, dweight_TK = moe_combine_backward(dout_TD, *ctx.saved_tensors)
        extras = [None if dtype is None else dout_TD.to(dtype) for dtype in ctx.extras]
        return dy_ND, dweight_TK, *extras, None, None
