"""Activation, then a linear layer, in plain PyTorch: autograd saves the activation's output too."""

import torch
import torch.nn.functional as F

from slipstream.ops.activation.options import ActivationOptions
from slipstream.ops.activation.reference import activation_reference


def activation_linear_reference(
    x: torch.Tensor,
    up: torch.Tensor | None,
    w_DF: torch.Tensor,
    bias_D: torch.Tensor | None,
    options: ActivationOptions,
) -> torch.Tensor:
    """``activation(x, up) @ w^T + bias`` in the dtype of ``x``."""
    gate, up = options.halves(x, up)
    a = activation_reference(gate, up, options.gating, options.alpha, options.limit)
    return F.linear(a, w_DF.to(x.dtype), None if bias_D is None else bias_D.to(x.dtype))
