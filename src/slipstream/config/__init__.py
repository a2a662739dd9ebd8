"""Recipes (TOML) and ``section.key=value`` overrides to pydantic models; knows no component."""

from slipstream.config.base import Config, FloatOrInf
from slipstream.config.load import load, overlay, read, source_of, validate
from slipstream.config.overrides import parse_overrides
from slipstream.config.show import difference, to_toml

__all__ = [
    "Config",
    "FloatOrInf",
    "difference",
    "load",
    "overlay",
    "parse_overrides",
    "read",
    "source_of",
    "to_toml",
    "validate",
]
