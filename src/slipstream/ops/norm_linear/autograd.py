"""Norm and linear as one autograd function that saves what the norm alone saves.

Backward: ``dy = dz w``; the norm's kernel makes ``dx`` and writes ``y`` again; ``dw = dz^T y``.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from slipstream.ops.norm.autograd import distinct, run_backward, run_forward
from slipstream.ops.norm.options import NormOptions


def norm_linear_triton(
    x: torch.Tensor,
    weight_D: torch.Tensor,
    w_OD: torch.Tensor,
    bias_D: torch.Tensor | None,
    bias_O: torch.Tensor | None,
    residual: torch.Tensor | None,
    kind: str,
    eps: float,
    cast: str,
    offset: float,
    activation: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``y @ w^T + bias_O`` and ``s``; ``y`` lives until the product is done."""
    options = NormOptions(kind=kind, eps=eps, cast=cast, offset=offset, activation=activation)
    x, residual = distinct(x, residual)
    dtype, device = x.dtype, x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        # Backward runs outside of autocast: the function says itself what is cast.
        with torch.autocast(device, enabled=False):
            z, *s = _NormLinear.apply(x, weight_D, bias_D, residual, w_OD, bias_O, options, dtype)
    else:
        z, *s = _NormLinear.apply(x, weight_D, bias_D, residual, w_OD, bias_O, options, dtype)
    return z, s[0] if s else x


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_D: torch.Tensor,
        bias_D: torch.Tensor | None,
        residual: torch.Tensor | None,
        w_OD: torch.Tensor,
        bias_O: torch.Tensor | None,
        options: NormOptions,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, ...]:
        done = run_forward(x, weight_D, bias_D, residual, options, ctx.needs_input_grad[0])
        bias = None if bias_O is None else bias_O.to(dtype)
        z = F.linear(done.y.to(dtype), w_OD.to(dtype), bias)
        # The weight as it is: a cast copy would be kept from here to the backward.
        ctx.save_for_backward(w_OD, *done.saved)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.dtype = options, dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.bias_dtype = None if bias_O is None else bias_O.dtype
        return (z,) if done.s is None else (z, done.s)

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        dz, ds = grads if len(grads) == 2 else (grads[0], None)
        w_OD, *saved = ctx.saved_tensors
        *of_norm, needs_w, needs_bias = ctx.needs_input_grad[:6]
        dw_OD = dbias_O = dy = None
        y_dtype = ctx.dtype if needs_w and dz is not None else None
        if dz is not None and (any(of_norm) or needs_w):
            dy = dz @ w_OD.to(ctx.dtype)
        found, y = run_backward(
            dy, ds, tuple(saved), ctx.options, tuple(of_norm), ctx.residual_dtype, y_dtype
        )
        if dz is not None:
            dz_TO = dz.reshape(-1, dz.shape[-1])
            if y is not None:
                dw_OD = (dz_TO.T @ y.reshape(-1, y.shape[-1])).to(w_OD.dtype)
            if needs_bias:
                dbias_O = dz_TO.sum(0, dtype=ctx.bias_dtype)
        return *found, dw_OD, dbias_O, None, None
