"""What is not a tensor in an AdamW step."""

from dataclasses import dataclass
from typing import Literal

Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWOptions:
    """The scalars of a step and how results are rounded."""

    lr: float
    """Learning rate of this step."""
    beta1: float = 0.9
    """Decay of the mean of the gradient."""
    beta2: float = 0.95
    """Decay of the mean of its square."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled: the weight shrinks by lr * weight_decay."""
    rounding: Rounding | None = None
    """Of 16-bit parameters without masters, which need one. ``nearest`` is what PyTorch does: an
    update below half a unit vanishes. ``stochastic`` keeps it on average, in bf16 only; it also
    rounds bf16 moments."""
    seed: int = 0
    """Of stochastic rounding: the same seed, step and place in the bucket round the same way."""
    zero_grads: bool = False
    """Leave zeros in the gradients, in the same pass and also where the step is skipped."""
