"""Norm, then linear, in plain PyTorch under autograd: keeps the normed tensor."""

import torch
import torch.nn.functional as F

from slipstream.ops.norm.reference import norm_reference


def norm_linear_reference(
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
    """``y @ w^T + bias_O`` and ``s``, where ``y, s = norm(x, ...)``."""
    y, s = norm_reference(x, weight_D, bias_D, residual, kind, eps, cast, offset, activation)
    return F.linear(y, w_OD.to(y.dtype), None if bias_O is None else bias_O.to(y.dtype)), s
