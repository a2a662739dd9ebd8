"""What an activation computes, apart from its tensors."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationOptions:
    """The non-tensor arguments of the op, and how they read its tensors."""

    gating: str
    """The function of the gate: ``silu``, ``gelu``, ``gelu_tanh``, ``relu2`` or ``clamped``."""
    gated: bool
    """Whether its value is multiplied by a second projection."""
    alpha: float
    """Steepness of ``clamped``."""
    limit: float
    """Clamp of ``clamped``."""

    def width(self, x: torch.Tensor, up: torch.Tensor | None) -> int:
        """F: features of the output for these inputs."""
        return x.shape[-1] // 2 if self.gated and up is None else x.shape[-1]

    def halves(
        self, x: torch.Tensor, up: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gate and up; a gated ``x`` without ``up`` holds both."""
        if not self.gated or up is not None:
            return x, up
        gate, up = x.chunk(2, dim=-1)
        return gate, up
