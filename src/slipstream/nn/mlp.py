"""The dense feed-forward block: gate and up in one matrix product, activation, down."""

import torch
from torch import nn

from slipstream import ops
from slipstream.nn.linear import Linear
from slipstream.ops.activation import is_gated


class MLP(nn.Module):
    """``w2(activation(w13(x)))``; ``w13 (2F, D)`` holds the gate rows, then the up rows."""

    def __init__(self, dim: int, hidden: int, *, activation: str, bias: bool = False) -> None:
        super().__init__()
        self.activation = activation
        self.w13 = Linear(dim, hidden * (2 if is_gated(activation) else 1), bias=bias)
        self.w2 = Linear(hidden, dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(..., D)`` to ``(..., D)``."""
        return self.w2(ops.activation(self.w13(x), kind=self.activation))

    def reset_parameters(self, std: float, out_std: float) -> None:
        """Normal weights; ``out_std`` for the projection into the residual stream."""
        self.w13.reset_parameters(std)
        self.w2.reset_parameters(out_std)
