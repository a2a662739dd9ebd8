"""Say in plain words what is wrong with a recipe, and where each wrong value came from."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from slipstream.config.overrides import split_override

_WORDS = {
    "missing": "is required",
    "extra_forbidden": "is not a known key",
    "finite_number": "must be a finite number",
    "string_type": "must be text, in quotes",
    "tuple_type": 'must be a list, as in ["a", "b"]',
}
_WORDS |= dict.fromkeys(
    ("int_type", "int_parsing", "int_parsing_size", "int_from_float"),
    "must be a whole number (an integer)",
)
_WORDS |= dict.fromkeys(("float_type", "float_parsing"), "must be a number")
_WORDS |= dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false")
_WORDS |= dict.fromkeys(
    ("model_type", "model_attributes_type", "dict_type"), "must be a table of keys"
)


def describe(error: ValidationError, source: str, overrides: Iterable[str]) -> str:
    """Every problem of ``error`` on one line, behind the override or ``source`` it came from."""
    given = {split_override(item)[0]: item for item in overrides}
    by_place: dict[str, list[str]] = {}
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"])
        line = _explain(item, key or "recipe")
        by_place.setdefault(_place(key, line, source, given), []).append(line)
    return "; ".join(f"{place}: {'; '.join(lines)}" for place, lines in by_place.items())


def _place(key: str, line: str, source: str, given: Mapping[str, str]) -> str:
    if any(key == name or key.startswith(name + ".") for name in given):
        return "override"
    # A rule that joins several keys names them all, dotted or as a key of the section it is about.
    words = set(re.findall(r"[\w.]*\w", line))
    section = f"{key}." if key else ""
    found = [
        item
        for name, item in given.items()
        if name in words or (name.startswith(section) and name.removeprefix(section) in words)
    ]
    return f"{source} with {' '.join(found)}" if found else source


def _explain(item: Any, key: str) -> str:
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
    if item["type"] == "missing":
        return f"{key} {_WORDS['missing']}"
    given = "" if isinstance(item["input"], dict) else f" = {item['input']!r}"
    return f"{key}{given}: {_WORDS.get(item['type'], message)}"
