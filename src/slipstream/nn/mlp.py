"""The dense feed-forward block: gate and up in one matrix product, activation, down."""

import torch

from slipstream import ops
from slipstream.nn.linear import Linear
from slipstream.nn.norm import Normed
from slipstream.nn.saved import recomputed
from slipstream.nn.site import Site
from slipstream.ops.activation import is_gated


class MLP(Site):
    """``w2(activation(w13(x)))``; ``w13 (2F, D)`` holds the gate rows, then the up rows.

    ``recompute``: what backward keeps. keep: the normed input, the hidden values before and behind
    the activation; reemit: those before it; recompute: nothing.
    """

    recompute_actions = ("keep", "reemit", "recompute")

    def __init__(self, dim: int, hidden: int, *, activation: str, bias: bool = False) -> None:
        super().__init__()
        self.activation = activation
        self.w13 = Linear(dim, hidden * (2 if is_gated(activation) else 1), bias=bias)
        self.w2 = Linear(hidden, dim, bias=bias)

    def forward(self, x: torch.Tensor | Normed) -> torch.Tensor:
        """``(..., D)`` to ``(..., D)``; of a plain tensor the input stays with who keeps it."""
        if self.recompute == "recompute":
            use = lambda _, a: self.w2(a)  # noqa: E731
            if isinstance(x, Normed):
                return x.recomputed(self._hidden, use)
            return recomputed(self._hidden, use, x)
        if self.recompute == "keep":
            return self.w2(self._hidden(x.read() if isinstance(x, Normed) else x)[1])
        h = x.linear(self.w13) if isinstance(x, Normed) else self.w13(x)
        return ops.activation_linear(h, self.w2.weight, None, self.w2.bias, kind=self.activation)

    def _hidden(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Before and behind the activation."""
        h = self.w13(x)
        return h, ops.activation(h, kind=self.activation)

    def reset_parameters(self, std: float, out_std: float) -> None:
        """Normal weights; ``out_std`` for the projection into the residual stream."""
        self.w13.reset_parameters(std)
        self.w2.reset_parameters(out_std)
