"""A linear layer whose weights may be wider than the activations.

Weights are cast to the dtype of the input, so fp32 master weights train a bf16 forward and their
gradients arrive in fp32.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Module):
    """``x @ weight^T + bias`` with ``weight (out, in)``, computed in the dtype of ``x``."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(..., in)`` to ``(..., out)``."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)

    def reset_parameters(self, std: float) -> None:
        """Normal weights of the given standard deviation, zero bias."""
        nn.init.normal_(self.weight, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
