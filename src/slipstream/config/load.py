"""Load a recipe: TOML file, then overrides, then one validation with errors that name the key.

A key that does not exist is reported with the nearest one that does.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from slipstream.config.overrides import parse_overrides
from slipstream.config.problems import describe
from slipstream.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=BaseModel)


def load(cls: type[ConfigT], path: Path | None, overrides: Iterable[str] = ()) -> ConfigT:
    """Read the recipe at ``path`` (None: defaults only), apply ``overrides``, validate as ``cls``.

    Raises ConfigError for an unreadable file, bad TOML, an unknown key or a wrong value.
    """
    overrides = tuple(overrides)
    return validate(cls, read(cls, path, overrides), source_of(path), overrides)


def read(cls: type[BaseModel], path: Path | None, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The values of a recipe with ``overrides`` on top, keys checked against ``cls``.

    Raises ConfigError for an unreadable file, bad TOML or an unknown key.
    """
    values = {} if path is None else read_toml(path)
    _reject_unknown(cls, values, source_of(path))
    changes = parse_overrides(overrides, keys_of(cls))
    _reject_unknown(cls, changes, "override")
    return overlay(values, changes)


def source_of(path: Path | None) -> str:
    """What errors call the recipe at ``path``."""
    return "defaults" if path is None else str(path)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; ConfigError says what is wrong and on which line."""
    try:
        # Some editors begin a file with a byte order mark.
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such recipe; give the path of a .toml file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def validate(
    cls: type[ConfigT], values: Mapping[str, Any], source: str, overrides: Iterable[str] = ()
) -> ConfigT:
    """Build ``cls`` from ``values``; every problem is listed in one ConfigError naming its key.

    Values are said to come from ``source``, those that ``overrides`` set from their override.
    """
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe(error, source, overrides)) from None


def overlay(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` on top, table by table; neither is altered."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = overlay(old, value) if both else value
    return merged


def keys_of(cls: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Every dotted key below ``cls`` with its annotation, sections included."""
    keys: dict[str, Any] = {}
    for name, field in cls.model_fields.items():
        keys[prefix + name] = field.annotation
        section = section_of(field.annotation)
        if section is not None:
            keys.update(keys_of(section, f"{prefix}{name}."))
    return keys


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The config class behind an annotation (``Section`` or ``Section | None``), if it is one."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _reject_unknown(cls: type[BaseModel], values: Mapping[str, Any], source: str) -> None:
    known = keys_of(cls)
    for key in _dotted(values, known):
        if key in known:
            continue
        leaf = key.rpartition(".")[2]
        same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
        near = same_leaf[:1] or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"sections are {', '.join(cls.model_fields)}"
        raise ConfigError(f"{source}: unknown key {key}; {hint}")


def _dotted(values: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for name, value in values.items():
        key = prefix + name
        open_table = isinstance(value, dict) and (
            key not in known or section_of(known[key]) is not None
        )
        keys += _dotted(value, known, key + ".") if open_table and value else [key]
    return keys
