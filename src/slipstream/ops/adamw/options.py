"""The scalars of one AdamW step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWOptions:
    """What is not a tensor."""

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
