"""A norm and the linear layer behind it, without the normed tensor kept between them."""

from typing import Any

import torch

from slipstream.errors import ShapeError
from slipstream.ops import check, dispatch
from slipstream.ops.dispatch import Refusal
from slipstream.ops.norm import check_norm, refuse_kernels
from slipstream.ops.norm_linear.autograd import norm_linear_triton
from slipstream.ops.norm_linear.reference import norm_linear_reference


def norm_linear(
    x: torch.Tensor,
    weight_D: torch.Tensor,
    w_OD: torch.Tensor,
    bias_D: torch.Tensor | None = None,
    bias_O: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    kind: str = "rms",
    eps: float = 1e-6,
    cast: str = "llama",
    offset: float = 0.0,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(z, s)``: ``y, s = norm(x, ...)`` and ``z = y @ w^T + bias_O``, of shape ``(..., O)``.

    Options and tensors are those of ``norm``, ``w_OD (O, D)`` and ``bias_O (O,)`` those of a linear
    layer, cast to the dtype of ``x`` (of autocast where it is on). ``y`` is not kept: the backward
    of the norm writes it again in the pass that makes ``dx``, one ``T x D`` write more, and the
    product for the gradient of ``w`` reads it from there. The second time ``y`` has the same bits.
    Raises ShapeError.
    """
    check_norm("norm_linear", x, weight_D, bias_D, residual, kind, eps, cast, activation)
    check.shape("norm_linear", "w", w_OD, None, x.shape[-1])
    if bias_O is not None:
        check.shape("norm_linear", "bias_O", bias_O, w_OD.shape[0])
    for name, tensor in (("w", w_OD), ("bias_O", bias_O)):
        if tensor is not None and not tensor.is_floating_point():
            raise ShapeError(f"norm_linear: {name} is {tensor.dtype}, expected a float dtype")
    check.same_device("norm_linear", x=x, w=w_OD, bias_O=bias_O)
    return dispatch.call(
        "norm_linear",
        x,
        weight_D,
        w_OD,
        bias_D,
        bias_O,
        residual,
        kind,
        eps,
        cast,
        offset,
        activation,
    )


def _refuse(
    x: torch.Tensor,
    weight_D: torch.Tensor,
    _w_OD: torch.Tensor,
    bias_D: torch.Tensor | None,
    _bias_O: torch.Tensor | None,
    residual: torch.Tensor | None,
    *_: Any,
) -> Refusal | None:
    return refuse_kernels(x, weight_D, bias_D, residual)


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    x_TD = torch.randn(16, 64, device=device, dtype=dtype)
    w_OD = torch.randn(32, 64, device=device, dtype=dtype)
    weight_D = torch.ones(64, device=device, dtype=dtype)
    return (x_TD, weight_D, w_OD, None, None, None, "rms", 1e-6, "llama", 0.0, None), {}


dispatch.register(
    "norm_linear",
    ("triton", norm_linear_triton, _refuse),
    ("reference", norm_linear_reference, None),
    example=_example,
)

__all__ = ["norm_linear"]
