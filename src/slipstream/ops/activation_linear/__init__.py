"""An MLP's activation and the linear layer after it, with nothing saved between the two."""

from typing import Any

import torch

from slipstream.ops import check, dispatch
from slipstream.ops.activation import ALPHA, LIMIT, checked_options, refuse_triton
from slipstream.ops.activation.options import ActivationOptions
from slipstream.ops.activation_linear.autograd import (
    activation_linear_reemit,
    activation_linear_triton,
)
from slipstream.ops.activation_linear.reference import activation_linear_reference
from slipstream.ops.dispatch import Refusal
from slipstream.ops.moe.checks import floating, follow_autocast


def activation_linear(
    x: torch.Tensor,
    w_DF: torch.Tensor,
    up: torch.Tensor | None = None,
    bias_D: torch.Tensor | None = None,
    *,
    kind: str,
    alpha: float = ALPHA,
    limit: float = LIMIT,
) -> torch.Tensor:
    """``linear(activation(x, up), w, bias)``, ``(..., D)`` in the dtype of ``x``.

    ``x`` and ``up`` as in ``ops.activation``, ``w_DF (D, F)``, ``bias_D (D,)``; both are cast to
    the dtype of ``x``, their gradients come back in theirs; under autocast ``x`` is cast first.
    Saves ``x``, ``up`` and the weight: the backward of the activation writes its output once more,
    for the weight's gradient. Raises ShapeError.
    """
    op = "activation_linear"
    options = checked_options(op, x, up, kind, alpha, limit)
    check.shape(op, "w", w_DF, None, options.width(x, up))
    if bias_D is not None:
        check.shape(op, "bias", bias_D, w_DF.shape[0])
    floating(op, x=x, up=up, w=w_DF, bias=bias_D)
    check.same_device(op, x=x, w=w_DF, bias=bias_D)
    x, precision = follow_autocast(x)
    if up is not None:
        up, _ = follow_autocast(up)
    with precision:
        return dispatch.call(op, x, up, w_DF, bias_D, options)


def _refuse(x: torch.Tensor, up: torch.Tensor | None, *_: Any) -> Refusal | None:
    return refuse_triton(x, up)


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    gate, up = torch.randn(2, 16, 64, device=device, dtype=dtype)
    w_DF = torch.randn(32, 64, device=device, dtype=dtype)
    options = ActivationOptions(gating="silu", gated=True, alpha=ALPHA, limit=LIMIT)
    return (gate, up, w_DF, None, options), {}


dispatch.register(
    "activation_linear",
    ("triton", activation_linear_triton, _refuse),
    ("reemit", activation_linear_reemit, None),
    ("reference", activation_linear_reference, None),
    example=_example,
)

__all__ = ["activation_linear"]
