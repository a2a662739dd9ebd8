"""RMSNorm or LayerNorm with an optional residual add before it."""

import torch
from torch import nn

from slipstream import ops


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
