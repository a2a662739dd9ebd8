"""Limits on the figures of a diagnosis, for a CI job that is to fail when one is passed."""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slipstream.errors import ConfigError

HIGH_IS_GOOD = frozenset({"busy_pct", "busy_with_copies_pct", "overlap_pct", "compute_pct"})
"""Figures that fail below their limit; all others fail above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A limit that was passed."""

    name: str
    """The figure."""
    value: float
    """What it is."""
    limit: float
    """What was allowed."""

    def __str__(self) -> str:
        side = "below" if self.name in HIGH_IS_GOOD else "above"
        return f"{self.name} = {self.value:.2f} is {side} the limit {self.limit:g}"


def gate(summary: Mapping[str, float | None], rules: Iterable[str]) -> list[Failure]:
    """The rules (``name=limit``) that ``summary`` breaks, in order; empty if it passes.

    A figure without a value, such as the overlap of a job that does not communicate, passes.
    Raises ConfigError for a name the summary does not have and a limit that is no number.
    """
    failures = []
    for rule in rules:
        name, limit = _parse(rule, list(summary))
        value = summary[name]
        if value is None:
            continue
        if value < limit if name in HIGH_IS_GOOD else value > limit:
            failures.append(Failure(name=name, value=value, limit=limit))
    return failures


def _parse(rule: str, names: list[str]) -> tuple[str, float]:
    name, equals, text = (part.strip() for part in rule.partition("="))
    if not equals or not name or not text:
        raise ConfigError(
            f"--fail-on {rule!r} is not name=limit; write it as exposed_communication_pct=20"
        )
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"--fail-on {name}: no such figure; {hint}there are {', '.join(names)}")
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise ConfigError(
            f"--fail-on {name}={text}: the limit is not a number; write it as {name}=20"
        )
    return name, limit
