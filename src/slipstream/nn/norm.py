"""RMSNorm or LayerNorm with an optional residual add before it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slipstream import ops
from slipstream.nn.linear import Linear
from slipstream.nn.saved import Make, Recompute, region


class Norm(nn.Module):
    """Norm over the last dimension; see ``ops.norm`` for the cast orders."""

    def __init__(
        self,
        dim: int,
        *,
        kind: str = "rms",
        eps: float = 1e-6,
        bias: bool = False,
        cast: str = "llama",
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None
        self.kind, self.eps, self.cast = kind, eps, cast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``norm(x)``."""
        return self._norm(x, None)[0]

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(s), s)`` with ``s = x + residual``: one op for the pair between sublayers."""
        return self._norm(x, residual)

    def before(self, x: torch.Tensor, residual: torch.Tensor | None) -> "Normed":
        """``norm(s)`` for a sublayer that decides itself how to read it."""
        return Normed(self, x, residual)

    def _norm(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.norm(
            x,
            self.weight,
            self.bias,
            residual=residual,
            kind=self.kind,
            eps=self.eps,
            cast=self.cast,
        )

    def reset_parameters(self) -> None:
        """Ones and zeros."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Normed:
    """``norm(s)`` with ``s = x + residual``, not computed yet.

    The sublayer behind the norm calls one of the methods, once; ``s`` is there afterwards.
    """

    def __init__(self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        self.norm, self.x, self.residual = norm, x, residual
        self.s = x
        """The residual stream behind the add, once a method has run."""

    def read(self) -> torch.Tensor:
        """The value; autograd keeps it for whoever reads it, and ``s``."""
        if self.residual is None:
            return self.norm(self.x)
        y, self.s = self.norm.add(self.x, self.residual)
        return y

    def linear(self, linear: Linear) -> torch.Tensor:
        """``linear(value)``; the backward of the norm makes the value again on its way."""
        norm = self.norm
        z, s = ops.norm_linear(
            self.x,
            norm.weight,
            linear.weight,
            norm.bias,
            linear.bias,
            residual=self.residual,
            kind=norm.kind,
            eps=norm.eps,
            cast=norm.cast,
        )
        if self.residual is not None:
            self.s = s
        return z

    def recomputed(self, make: Make, use: Callable[..., Any]) -> Any:
        """``use(*make(value))``; only ``s`` is kept of the value and what ``make`` returns.

        See ``nn.saved.recomputed``. While compiling, the add is an op of its own.
        """
        if torch.compiler.is_compiling():
            if self.residual is not None:
                self.s = self.x + self.residual
            return use(*region(self._again(make), self.s))
        if not torch.is_grad_enabled():
            return use(*make(self.read()))
        with Recompute() as scope:
            y = self.read()
            values = make(y)
            result = use(*values)
            scope.drop((y, *values), self._again(make, with_value=True), (self.s,))
        return result

    def _again(self, make: Make, *, with_value: bool = False) -> Make:
        norm = self.norm

        def again(s: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = norm(s)
            return (y, *make(y)) if with_value else make(y)

        return again
