"""RMSNorm and LayerNorm with an optional activation and residual add before the norm."""

from typing import Any, Literal

import torch

from slipstream.errors import ShapeError
from slipstream.ops import check, dispatch, triton_support
from slipstream.ops.dispatch import Refusal
from slipstream.ops.norm.autograd import norm_triton
from slipstream.ops.norm.reference import norm_reference

NormKind = Literal["rms", "layer"]
CastOrder = Literal["llama", "fp32"]
Before = Literal["silu", "gelu", "gelu_tanh", "relu2"]


def norm(
    x: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    kind: str = "rms",
    eps: float = 1e-6,
    cast: str = "llama",
    offset: float = 0.0,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise over the last dimension; returns ``(y, s)``, both of the shape and dtype of ``x``.

    ``s = activation(x) + residual`` (``x`` itself where neither is given) and ``y = norm(s)``.
    ``x (..., D)``, ``weight_D (D,)``, ``bias_D (D,)``, ``residual (..., D)``. Statistics in fp32.
    ``cast``: ``llama`` rounds the normalised value before the weight, ``fp32`` multiplies in fp32
    and rounds last. ``offset`` is added to the weight (Gemma stores ``weight - 1``: 1.0).
    RMSNorm: arXiv 1910.07467; LayerNorm: arXiv 1607.06450. Raises ShapeError.
    """
    check_norm("norm", x, weight_D, bias_D, residual, kind, eps, cast, activation)
    return dispatch.call("norm", x, weight_D, bias_D, residual, kind, eps, cast, offset, activation)


def activation_norm(
    x: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None = None,
    *,
    activation: str,
    kind: str = "layer",
    eps: float = 1e-6,
    cast: str = "llama",
    offset: float = 0.0,
) -> torch.Tensor:
    """The first output of ``norm`` for an activation without residual: ``norm(activation(x))``.

    The activated tensor is neither written nor kept: ``x`` is read and ``y`` written, no more.
    Shapes, options and errors are those of ``norm``.
    """
    check_norm("activation_norm", x, weight_D, bias_D, None, kind, eps, cast, activation)
    arguments = (x, weight_D, bias_D, None, kind, eps, cast, offset, activation, False)
    return dispatch.call("norm", *arguments)[0]


def check_norm(
    op: str,
    x: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    residual: torch.Tensor | None,
    kind: str,
    eps: float,
    cast: str,
    activation: str | None,
) -> None:
    """Raise unless the arguments of a norm make sense together."""
    check.choice(op, "kind", kind, NormKind)
    check.choice(op, "cast", cast, CastOrder)
    if activation is not None:
        check.choice(op, "activation", activation, Before)
    if not eps >= 0:
        raise ShapeError(f"{op}: eps = {eps}, expected a number of at least 0")
    check.rows(op, "x", x, "(..., D)")
    check.shape(op, "weight", weight_D, x.shape[-1])
    if bias_D is not None:
        check.shape(op, "bias", bias_D, x.shape[-1])
    if residual is not None and residual.shape != x.shape:
        raise ShapeError(
            f"{op}: residual {tuple(residual.shape)} and x {tuple(x.shape)} must have one shape"
        )
    check.floating(op, weight=weight_D, bias=bias_D, residual=residual)
    check.same_device(op, x=x, weight=weight_D, bias=bias_D, residual=residual)


def refuse_kernels(*tensors: torch.Tensor | None) -> Refusal | None:
    """Why the kernels cannot take these tensors; None where they can."""
    for tensor in tensors:
        refusal = None if tensor is None else triton_support.refusal(tensor)
        if refusal is not None:
            return refusal
    return None


def _refuse(
    x: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    residual: torch.Tensor | None,
    *_: Any,
) -> Refusal | None:
    return refuse_kernels(x, weight_D, bias_D, residual)


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    x_TD = torch.randn(16, 64, device=device, dtype=dtype)
    weight_D = torch.ones(64, device=device, dtype=dtype)
    return (x_TD, weight_D, None, None, "rms", 1e-6, "llama", 0.0, None), {}


dispatch.register(
    "norm",
    ("triton", norm_triton, _refuse),
    ("reference", norm_reference, None),
    example=_example,
)

__all__ = ["CastOrder", "NormKind", "activation_norm", "check_norm", "norm", "refuse_kernels"]
