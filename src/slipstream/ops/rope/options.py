"""The RMS norm of every head of q and k before the rotation."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class QKNormOptions:
    """What ``ops.norm`` calls the same."""

    eps: float
    """Added to the mean square."""
    cast: str
    """``llama`` rounds the normalised value before the weight, ``fp32`` after it."""
    offset: float
    """Added to the weights."""
