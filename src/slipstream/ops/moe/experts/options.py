"""The scalars of the experts, their checks, and how gate and up rows lie in the up projection."""

from dataclasses import dataclass
from typing import Literal

import torch

from slipstream.ops.activation import ALPHA, GATED, LIMIT

Save = Literal["h", "x"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsOptions:
    """What is not a tensor; field meanings are those of ``experts``."""

    activation: str
    """``swiglu``, ``swiglu_clamped``, ...: a kind of ``slipstream.ops.activation``."""
    interleaved: bool = False
    """Rows of ``w13`` are gate 0, up 0, gate 1, up 1, ... instead of all gates, then all ups."""
    alpha: float = ALPHA
    """``swiglu_clamped`` only: steepness."""
    limit: float = LIMIT
    """``swiglu_clamped`` only: clamp of gate and up."""
    save: Save = "h"
    """What backward keeps besides x: the pre-activation h, or nothing (h is computed again)."""

    @property
    def gated(self) -> bool:
        """Whether ``w13`` has 2F rows."""
        return self.activation in GATED

    @property
    def gating(self) -> str:
        """The function applied to the gate, as ``activation_reference`` names it."""
        return GATED.get(self.activation, self.activation)

    def split(self, h_NP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gate and up ``(N, F)`` as views of ``h``; (h, None) where the activation is plain."""
        if not self.gated:
            return h_NP, None
        if self.interleaved:
            return h_NP[:, 0::2], h_NP[:, 1::2]
        gate, up = h_NP.chunk(2, dim=-1)
        return gate, up

    def join(self, gate_NF: torch.Tensor, up_NF: torch.Tensor | None) -> torch.Tensor:
        """The inverse of ``split``, contiguous."""
        if up_NF is None:
            return gate_NF
        if self.interleaved:
            return torch.stack((gate_NF, up_NF), dim=-1).flatten(1)
        return torch.cat((gate_NF, up_NF), dim=-1)
