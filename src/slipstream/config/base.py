"""The base of every configuration section, and the float fields that may be infinite."""

import math
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Config(BaseModel):
    """A frozen section: unknown keys, nan and inf are errors; field docs reach the JSON schema."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def _not_nan(value: float) -> float:
    if math.isnan(value):
        raise ValueError("must be a number or inf, not nan")
    return value


FloatOrInf = Annotated[float, Field(allow_inf_nan=True), AfterValidator(_not_nan)]
"""A float field for which inf has a meaning ("off"); every other one refuses it."""
