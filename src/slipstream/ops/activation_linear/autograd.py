"""Activation and the linear layer after it as one node that saves the pre-activation alone.

The layer's weight gradient needs the activation's output: the pass that computes the gradient of
the pre-activation has all it takes to write it once more.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from slipstream.ops.activation.backward import activation_backward
from slipstream.ops.activation.fused import activation_forward, activation_grads
from slipstream.ops.activation.options import ActivationOptions
from slipstream.ops.activation.reference import activation_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """The non-tensor arguments."""

    options: ActivationOptions
    kernels: bool
    """Whether the elementwise passes are Triton's."""


def activation_linear_triton(
    x: torch.Tensor,
    up: torch.Tensor | None,
    w_DF: torch.Tensor,
    bias_D: torch.Tensor | None,
    options: ActivationOptions,
) -> torch.Tensor:
    """Same as the reference; one kernel forward, one backward, beside the matrix products."""
    return _apply(x, up, w_DF, bias_D, _Call(options=options, kernels=True))


def activation_linear_reemit(
    x: torch.Tensor,
    up: torch.Tensor | None,
    w_DF: torch.Tensor,
    bias_D: torch.Tensor | None,
    options: ActivationOptions,
) -> torch.Tensor:
    """Same as the reference; saves what the kernels save, in plain PyTorch."""
    return _apply(x, up, w_DF, bias_D, _Call(options=options, kernels=False))


def _apply(
    x: torch.Tensor,
    up: torch.Tensor | None,
    w_DF: torch.Tensor,
    bias_D: torch.Tensor | None,
    call: _Call,
) -> torch.Tensor:
    if up is x:
        up = x.view_as(x)  # the compiler cannot pass one tensor twice to an autograd function
    return _ActivationLinear.apply(x, up, w_DF, bias_D, call)


class _ActivationLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        up: torch.Tensor | None,
        w_DF: torch.Tensor,
        bias_D: torch.Tensor | None,
        call: _Call,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, up, w_DF)
        ctx.call = call
        ctx.bias_dtype = None if bias_D is None else bias_D.dtype
        bias_D = None if bias_D is None else bias_D.to(x.dtype)
        return F.linear(_output(x, up, call), w_DF.to(x.dtype), bias_D)

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (dz,) = grads
        x, up, w_DF = ctx.saved_tensors
        needs_x, needs_up, needs_w, needs_bias, _ = ctx.needs_input_grad
        dx = dup = dw_DF = dbias_D = a = None
        if needs_x or needs_up:
            da = dz @ w_DF.to(dz.dtype)
            dx, dup, a = _gradients(da, x, up, ctx.call, want_output=needs_w)
        elif needs_w:
            a = _output(x, up, ctx.call)
        dz_TD = dz.reshape(-1, dz.shape[-1])
        if needs_w and a is not None:
            dw_DF = (dz_TD.t() @ a.reshape(-1, a.shape[-1])).to(w_DF.dtype)
        if needs_bias:
            dbias_D = dz_TD.sum(0).to(ctx.bias_dtype)
        return dx, dup, dw_DF, dbias_D, None


def _output(x: torch.Tensor, up: torch.Tensor | None, call: _Call) -> torch.Tensor:
    o = call.options
    if call.kernels:
        return activation_forward(x, up, o.gating, o.gated, o.alpha, o.limit)
    return activation_reference(*o.halves(x, up), o.gating, o.alpha, o.limit)


def _gradients(
    da: torch.Tensor, x: torch.Tensor, up: torch.Tensor | None, call: _Call, *, want_output: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of ``x`` and ``up``, and the activation's output where it is wanted."""
    o = call.options
    if call.kernels:
        dx, dup, a = activation_grads(da, x, up, o.gating, o.gated, o.alpha, o.limit, want_output)
        return dx, None if up is None else dup, a if want_output else None
    gate, factor = o.halves(x, up)
    dgate, dup = activation_backward(gate, factor, da, o.gating, o.alpha, o.limit)
    a = _output(x, up, call) if want_output else None
    if up is None and dup is not None:
        return torch.cat((dgate, dup), dim=-1), None, a
    return dgate, dup, a
