"""The Triton path of ``activation``, as custom ops that ``torch.compile`` treats as one step each.

Triton is imported when an op first runs, so that importing Slipstream does not need it.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from slipstream.ops.activation.options import ActivationOptions
from slipstream.ops.custom import custom_op, or_empty


def activation_triton(
    x: torch.Tensor, up: torch.Tensor | None, options: ActivationOptions
) -> torch.Tensor:
    """Same values as the reference; saves the pre-activation."""
    if up is x:
        up = x.view_as(x)  # the compiler cannot pass one tensor twice to an autograd function
    return _Activation.apply(x, up, options)


@custom_op("activation")
def activation_forward(
    x: torch.Tensor, up: torch.Tensor | None, gating: str, gated: bool, alpha: float, limit: float
) -> torch.Tensor:
    """The output, ``(..., F)``."""
    from slipstream.ops.activation import launch  # noqa: PLC0415

    options = ActivationOptions(gating=gating, gated=gated, alpha=alpha, limit=limit)
    return launch.forward(x, up, options)


@activation_forward.register_fake
def _(
    x: torch.Tensor, up: torch.Tensor | None, gating: str, gated: bool, alpha: float, limit: float
) -> torch.Tensor:
    width = x.shape[-1] // 2 if gated and up is None else x.shape[-1]
    return x.new_empty(*x.shape[:-1], width)


@custom_op("activation_backward")
def activation_grads(
    dout: torch.Tensor,
    x: torch.Tensor,
    up: torch.Tensor | None,
    gating: str,
    gated: bool,
    alpha: float,
    limit: float,
    want_output: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of ``x`` and ``up``, and the output again; what is not there is empty."""
    from slipstream.ops.activation import launch  # noqa: PLC0415

    options = ActivationOptions(gating=gating, gated=gated, alpha=alpha, limit=limit)
    dx, dup, out = launch.backward(dout, x, up, options, want_output=want_output)
    return dx, or_empty(dup, x), or_empty(out, x)


@activation_grads.register_fake
def _(
    dout: torch.Tensor,
    x: torch.Tensor,
    up: torch.Tensor | None,
    gating: str,
    gated: bool,
    alpha: float,
    limit: float,
    want_output: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        x.new_empty(x.shape),
        x.new_empty(0) if up is None else up.new_empty(up.shape),
        x.new_empty(dout.shape) if want_output else x.new_empty(0),
    )


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, up: torch.Tensor | None, options: ActivationOptions
    ) -> torch.Tensor:
        ctx.save_for_backward(x, up)
        ctx.options = options
        return activation_forward(
            x, up, options.gating, options.gated, options.alpha, options.limit
        )

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (dout,) = grads
        x, up = ctx.saved_tensors
        o = ctx.options
        dx, dup, _ = activation_grads(dout, x, up, o.gating, o.gated, o.alpha, o.limit, False)
        return dx, None if up is None else dup, None
