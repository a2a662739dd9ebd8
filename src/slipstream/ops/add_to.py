"""A weight whose gradient goes into a buffer of the caller instead of to the weight."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable


class AddTo(torch.autograd.Function):
    """``AddTo.apply(weight, buffer)`` is ``weight``; its gradient is added to ``buffer``."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """A view of ``weight``."""
        ctx.buffer = buffer
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        """Nothing for the weight."""
        ctx.buffer += grads[0]
        return None, None
