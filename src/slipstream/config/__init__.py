"""Recipes (TOML) and ``section.key=value`` overrides to pydantic models; knows no component."""

from slipstream.config.base import Config
from slipstream.config.load import load, overlay, parse_overrides, validate
from slipstream.config.show import difference, to_toml

__all__ = ["Config", "difference", "load", "overlay", "parse_overrides", "to_toml", "validate"]
