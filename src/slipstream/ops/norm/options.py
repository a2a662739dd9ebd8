"""What is said about a norm besides its tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NormOptions:
    """Options of ``norm``, checked."""

    kind: str
    """``rms`` or ``layer``."""
    eps: float
    cast: str
    """``llama`` or ``fp32``: see ``norm``."""
    offset: float
    """Added to the weight."""
    activation: str | None

    @property
    def flat(self) -> tuple[str, float, str, float, str | None]:
        """As arguments of a custom op."""
        return self.kind, self.eps, self.cast, self.offset, self.activation
