"""The base of every configuration section."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A frozen section of a recipe: unknown keys are errors, field docs reach the JSON schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
