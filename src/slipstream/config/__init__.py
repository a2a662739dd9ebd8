"""Recipes (TOML) and ``section.key=value`` overrides to pydantic models; knows no component."""

from slipstream.config.base import Config
from slipstream.config.load import load, parse_overrides, validate
from slipstream.config.show import difference, to_toml

__all__ = ["Config", "difference", "load", "parse_overrides", "to_toml", "validate"]
