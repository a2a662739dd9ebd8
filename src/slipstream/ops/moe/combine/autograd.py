"""Weighted sum of expert rows as K gathers in fixed order: no (T, K, D) tensor, no atomics."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from slipstream.ops.check import compute_dtype
from slipstream.ops.moe.routing import Routing


def combine_gather(
    y_ND: torch.Tensor,
    routing: Routing,
    residual_TD: torch.Tensor | None,
    shared_TD: torch.Tensor | None,
) -> torch.Tensor:
    """Same sum as the reference, slots added in order k = 0 .. K-1, then shared, then residual."""
    return _Combine.apply(
        y_ND,
        routing.weight_TK,
        routing.offsets_E1,
        routing.order_N,
        routing.position_N,
        residual_TD,
        shared_TD,
    )


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y_ND: torch.Tensor,
        weight_TK: torch.Tensor,
        offsets_E1: torch.Tensor,
        order_N: torch.Tensor,
        position_N: torch.Tensor,
        residual_TD: torch.Tensor | None,
        shared_TD: torch.Tensor | None,
    ) -> torch.Tensor:
        wide, position_TK = compute_dtype(y_ND), position_N.view(weight_TK.shape)
        out_TD = torch.zeros(weight_TK.shape[0], y_ND.shape[1], dtype=wide, device=y_ND.device)
        for weight_T, position_T in zip(weight_TK.unbind(1), position_TK.unbind(1), strict=True):
            # Not in place: torch 2.11's compiler then loses the gradient, without an error.
            rows_TD = _present(y_ND, position_T, offsets_E1)
            out_TD = out_TD + weight_T.to(wide)[:, None] * rows_TD
        for extra in (shared_TD, residual_TD):
            if extra is not None:
                out_TD = out_TD + extra
        ctx.save_for_backward(y_ND, weight_TK, offsets_E1, order_N, position_N)
        ctx.extras = [None if t is None else t.dtype for t in (residual_TD, shared_TD)]
        # Nor for a cast that changes nothing, for the same reason.
        return out_TD if wide == y_ND.dtype else out_TD.to(y_ND.dtype)

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (dout_TD,) = grads
        y_ND, weight_TK, offsets_E1, order_N, position_N = ctx.saved_tensors
        wide, position_TK = compute_dtype(y_ND), position_N.view(weight_TK.shape)
        rows_ND = dout_TD.index_select(0, order_N // weight_TK.shape[1]).to(wide)
        weight_N = weight_TK.to(wide).flatten()[order_N]
        absent_N = torch.arange(len(order_N), device=order_N.device) >= offsets_E1[-1]
        dy_ND = (rows_ND * weight_N[:, None]).masked_fill(absent_N[:, None], 0).to(y_ND.dtype)
        dout = dout_TD.to(wide)
        dweight_TK = torch.stack(
            [
                (dout * _present(y_ND, position_T, offsets_E1)).sum(1)
                for position_T in position_TK.unbind(1)
            ],
            dim=1,
        )
        extras = [None if dtype is None else dout_TD.to(dtype) for dtype in ctx.extras]
        return dy_ND, dweight_TK.to(weight_TK.dtype), None, None, None, *extras


def _present(
    y_ND: torch.Tensor, position_T: torch.Tensor, offsets_E1: torch.Tensor
) -> torch.Tensor:
    """One row of ``y`` per token, zeros where the slot is absent (its row may hold anything)."""
    absent_T = position_T >= offsets_E1[-1]
    return y_ND.index_select(0, position_T).masked_fill(absent_T[:, None], 0)
