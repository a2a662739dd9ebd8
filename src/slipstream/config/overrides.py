"""``section.key=value`` overrides: how the text after the sign becomes a value.

It is read as one TOML value (``1e-3``, ``true``, ``[1, 2]``) and as plain text where it is none.
Where the key wants text, a number, true or a date is the text that was typed, so a folder may be
called 123.
"""

import tomllib
from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any, get_args

from slipstream.errors import ConfigError


def parse_overrides(
    overrides: Iterable[str], annotations: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """``["optim.lr=3e-4"]`` to ``{"optim": {"lr": 0.0003}}``; a later one wins.

    ``annotations`` are the types of dotted keys; those of text keep what was typed.
    Raises ConfigError.
    """
    tree: dict[str, Any] = {}
    for item in overrides:
        key, text = split_override(item)
        *parents, leaf = key.split(".")
        table = tree
        for name in parents:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"override {item!r}: {name} is already set to a plain value")
        value = _parse_value(text)
        as_typed = _is_text((annotations or {}).get(key)) and not isinstance(value, list | dict)
        table[leaf] = text.strip() if as_typed and not isinstance(value, str) else value
    return tree


def split_override(item: str) -> tuple[str, str]:
    """Dotted key and text of an override; ConfigError unless it reads section.key=value."""
    key, equals, text = item.partition("=")
    names = [name.strip() for name in key.split(".")]
    if not equals or not all(names):
        raise ConfigError(f"override {item!r}: write section.key=value, as in optim.lr=3e-4")
    return ".".join(names), text


def _is_text(annotation: Any) -> bool:
    return annotation is str or set(get_args(annotation)) == {str, NoneType}


def _parse_value(text: str) -> Any:
    # The second reading fails where a comment would swallow the bracket, the first where a comma
    # ends the text; a line break that begins another key shows as a second key. So no part of
    # what was typed is ever dropped.
    try:
        alone = tomllib.loads(f"value = {text}")
        listed = tomllib.loads(f"value = [{text}]")
    except ValueError:
        return text.strip()
    whole = len(alone) == len(listed) == len(listed["value"]) == 1
    return alone["value"] if whole else text.strip()
