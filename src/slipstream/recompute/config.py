"""Settings of activation recomputation."""

from pydantic import field_validator

from slipstream.config import Config


class RecomputeConfig(Config):
    """Trade arithmetic for activation memory."""

    budget_gib: float | None = None
    """Activation memory to stay under, GiB; unset keeps every activation. This version has no
    planner, so any other value is refused."""

    @field_validator("budget_gib")
    @classmethod
    def _no_planner(cls, value: float | None) -> float | None:
        if value is not None:
            raise ValueError(
                "this version cannot recompute activations; leave it out and lower "
                "train.micro_batch to save memory"
            )
        return value
