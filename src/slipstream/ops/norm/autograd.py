"""The norm under autograd: saved are ``s`` (``x`` itself without residual) and row statistics.

After an activation the kernels need ``x`` too; without a residual they make ``s`` from it again.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from slipstream.ops.norm.custom_ops import norm_backward, norm_forward
from slipstream.ops.norm.options import NormOptions


def norm_triton(
    x: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    residual: torch.Tensor | None,
    kind: str,
    eps: float,
    cast: str,
    offset: float,
    activation: str | None,
    with_s: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``norm(s)`` and ``s``, one pass over the rows each way. ``with_s`` false: None for ``s``."""
    options = NormOptions(kind=kind, eps=eps, cast=cast, offset=offset, activation=activation)
    x, residual = distinct(x, residual)
    y, *s = _Norm.apply(x, weight_D, bias_D, residual, options, with_s)
    return y, s[0] if s else x if with_s else None


def distinct(
    x: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Both; the compiler cannot pass one tensor twice to an ``autograd.Function``."""
    if residual is x and torch.compiler.is_compiling():
        residual = x.view_as(x)
    return x, residual


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """What a forward made and what its backward needs."""

    y: torch.Tensor
    s: torch.Tensor | None
    """As an output; None where it is ``x`` and no gradient has to come back through it."""
    saved: tuple[torch.Tensor | None, ...]
    """``s``, ``x``, statistics, weight and bias, as arguments of ``norm_backward``."""


def run_forward(
    x: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    residual: torch.Tensor | None,
    options: NormOptions,
    needs_x: bool,
    with_s: bool = True,
) -> Forward:
    """The forward of a norm inside an ``autograd.Function``."""
    plain = options.activation is None
    is_x = plain and residual is None
    makes_s = residual is not None or (with_s and not plain)
    y, made, stats = norm_forward(x, weight_D, bias_D, residual, *options.flat, makes_s)
    s = made if makes_s else None
    if is_x and with_s:
        # As an output, x brings its gradient here, where it is added in the kernel. The compiler
        # loses the gradient of an output that is an input.
        s = x if needs_x and not torch.compiler.is_compiling() else None
    kept_s = x if is_x else None if residual is None else made
    return Forward(y=y, s=s, saved=(kept_s, None if plain else x, stats, weight_D, bias_D))


def run_backward(
    dy: torch.Tensor | None,
    ds: torch.Tensor | None,
    saved: tuple[torch.Tensor | None, ...],
    options: NormOptions,
    needed: tuple[bool, ...],
    residual_dtype: torch.dtype | None,
    y_dtype: torch.dtype | None = None,
) -> tuple[tuple[torch.Tensor | None, ...], torch.Tensor | None]:
    """Gradients of x, weight, bias and residual, in the order of ``needed``; ``y`` in ``y_dtype``.

    ``dy``, ``ds``: None where nothing came back.
    """
    needs_x, needs_weight, needs_bias, needs_residual = needed
    plain = options.activation is None
    if dy is None:
        if plain:
            dresidual = ds if needs_residual else None
            return (ds if needs_x else None, None, None, _cast(dresidual, residual_dtype)), None
        assert ds is not None
        dy = torch.zeros_like(ds)
    dx, dresidual, dweight_D, dbias_D, y = norm_backward(
        dy,
        ds,
        *saved,
        *options.flat,
        needs_x or (plain and needs_residual),
        needs_residual and not plain,
        needs_weight,
        needs_bias,
        y_dtype,
    )
    grads = (
        dx if needs_x else None,
        dweight_D if needs_weight else None,
        dbias_D if needs_bias else None,
        _cast(dx if plain else dresidual, residual_dtype) if needs_residual else None,
    )
    return grads, None if y_dtype is None else y


def _cast(grad: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    return grad if grad is None or dtype is None or grad.dtype == dtype else grad.to(dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_D: torch.Tensor,
        bias_D: torch.Tensor | None,
        residual: torch.Tensor | None,
        options: NormOptions,
        with_s: bool,
    ) -> tuple[torch.Tensor, ...]:
        needs_x = ctx.needs_input_grad[0]
        done = run_forward(x, weight_D, bias_D, residual, options, needs_x, with_s)
        ctx.save_for_backward(*done.saved)
        ctx.set_materialize_grads(False)
        ctx.options = options
        ctx.residual_dtype = None if residual is None else residual.dtype
        return (done.y,) if done.s is None else (done.y, done.s)

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        dy, ds = grads if len(grads) == 2 else (grads[0], None)
        found, _ = run_backward(
            dy, ds, ctx.saved_tensors, ctx.options, ctx.needs_input_grad[:4], ctx.residual_dtype
        )
        return *found, None, None
