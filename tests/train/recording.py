"""CUDA graphs as far as a CPU can stand in for them."""

import math
from collections.abc import Callable

import torch


class Tape:
    """Stands in for CUDA graphs on a CPU.

    A replay runs the function again as if at fixed addresses: gradients that were None when it was
    recorded are written, the others added to. Recording leaves NaN, as a graph that has not run
    leaves whatever was there.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.params = list(model.parameters())
        self.recorded = self.replayed = 0

    def warm_up(self, function: Callable[[], object]) -> None:
        torch.rand(1)
        for _ in range(2):
            function()

    def record(self, function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable]:
        self.recorded += 1
        fresh = [param.grad is None for param in self.params]
        output = function()
        static = [param.grad for param in self.params]
        for tensor in (output, *static):
            if tensor is not None:
                tensor.fill_(math.nan)

        def replay() -> None:
            self.replayed += 1
            outside = [param.grad for param in self.params]
            for param, grad, was_none in zip(self.params, static, fresh, strict=True):
                param.grad = None if was_none else grad
            output.copy_(function())
            for param, grad, mine in zip(self.params, static, outside, strict=True):
                if grad is not None and param.grad is not grad:
                    grad.copy_(param.grad)
                param.grad = mine

        return output, replay
