"""Print a config as TOML, whole or only what differs from the defaults."""

from typing import Any

import tomli_w
from pydantic import BaseModel


def to_toml(config: BaseModel) -> str:
    """The whole config as TOML; keys whose value is None (unset) are left out."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def difference(config: BaseModel) -> dict[str, Any]:
    """Nested values of ``config`` that differ from its field defaults (required ones included)."""
    changed: dict[str, Any] = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            inner = difference(value)
            if inner:
                changed[name] = inner
        elif field.is_required() or value != field.get_default(call_default_factory=True):
            changed[name] = value
    return changed
