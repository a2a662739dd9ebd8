"""Settings of activation recomputation."""

from typing import Literal, Self

from pydantic import PositiveFloat, model_validator

from slipstream.config import Config

Mode = Literal["none", "selective", "full", "auto"]


class RecomputeConfig(Config):
    """Trade arithmetic for activation memory."""

    mode: Mode = "none"
    """none: keep every activation; selective: give up what costs next to nothing to make again;
    full: keep the residual stream and the routing; auto: measure, and give up as little as
    budget_gib allows."""
    budget_gib: PositiveFloat | None = None
    """auto: the most memory of a device a step may take, GiB, weights and optimizer included."""

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.mode == "auto" and self.budget_gib is None:
            raise ValueError(
                "recompute.mode = 'auto' needs recompute.budget_gib, the GiB a step may take"
            )
        if self.mode != "auto" and self.budget_gib is not None:
            raise ValueError(
                f"recompute.budget_gib = {self.budget_gib:g} needs recompute.mode = 'auto', which "
                f"is {self.mode!r}; set the one or leave out the other"
            )
        return self
