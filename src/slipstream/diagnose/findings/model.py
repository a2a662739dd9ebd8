"""What a diagnosis says: findings with their evidence, and what could not be judged and why."""

import enum
from dataclasses import dataclass
from typing import Literal, NamedTuple

from slipstream.diagnose.hints import HINTS


class Confidence(enum.StrEnum):
    """How far the evidence carries the number at stake."""

    HIGH = "high"
    """Measured in the trace."""
    MEDIUM = "medium"
    """Computed from the trace by a model of what would happen instead."""
    LOW = "low"
    """An upper bound, or the trace lacks what would settle it."""


WEIGHT = {Confidence.HIGH: 1.0, Confidence.MEDIUM: 0.5, Confidence.LOW: 0.25}
"""Findings are ranked by milliseconds times this: each doubt halves what is expected of them."""

Value = float | int | str | list[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that costs time."""

    id: str
    """Stable name, a key of ``HINTS``."""
    title: str
    """The finding in one line, without its cost."""
    ms: float
    """Milliseconds at stake, per step or, without steps, in the whole file; on the worst rank."""
    per: Literal["step", "file"]
    """What ``ms`` is counted over."""
    pct: float
    """``ms`` as a percentage of the device's time over the same stretch."""
    confidence: Confidence
    """How sure ``ms`` is."""
    evidence: dict[str, Value]
    """Numbers by name, units in the names; milliseconds are those of the whole file."""
    kernels: tuple[str, ...] = ()
    """Kernels, operators or calls concerned, the most expensive first."""
    start_ms: float | None = None
    """Where to look: begin of the time range, from the first device work of the file."""
    end_ms: float | None = None
    """End of that range."""
    ranks: tuple[int, ...] = ()
    """Ranks concerned; empty for a single trace without a rank."""
    detail: str = ""
    """What was seen, in a sentence or two."""

    @property
    def ms_per_step(self) -> float | None:
        """``ms`` if it is per step, else None."""
        return self.ms if self.per == "step" else None

    @property
    def weight(self) -> float:
        """What findings are ranked by."""
        return self.ms * WEIGHT[self.confidence]

    @property
    def name(self) -> str:
        """The kind of finding in words."""
        return HINTS[self.id].title

    @property
    def action_slipstream(self) -> str | None:
        """The switch of this version that helps; None if there is none."""
        return HINTS[self.id].slipstream

    @property
    def action_pytorch(self) -> str:
        """What to do in plain PyTorch."""
        return HINTS[self.id].pytorch


class Abstention(NamedTuple):
    """A question the trace cannot answer."""

    id: str
    """The finding that was not judged, or ``all``."""
    reason: str
    """Why, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The diagnosis of a job."""

    findings: tuple[Finding, ...]
    """Ranked, the main one first; empty only if ``abstained`` holds ``all``."""
    abstained: tuple[Abstention, ...]
    """What was not judged."""
    resolved: tuple[str, ...] = ()
    """Findings withdrawn because another explains them, one sentence each."""

    @property
    def first(self) -> Finding | None:
        """The verdict: the main finding."""
        return self.findings[0] if self.findings else None

    def of(self, finding: str) -> Finding | None:
        """The finding of this id, if it was made."""
        return next((one for one in self.findings if one.id == finding), None)
