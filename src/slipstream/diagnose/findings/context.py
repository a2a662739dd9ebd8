"""One rank's trace as the finders see it: what was counted, what can be told, common arithmetic."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from slipstream.diagnose import intervals
from slipstream.diagnose.figures import Account
from slipstream.diagnose.findings.model import Abstention, Confidence, Finding, Value
from slipstream.diagnose.idle import Cause, Idle, explain
from slipstream.diagnose.operators import enclosing, operators_of
from slipstream.diagnose.replay import saved_before
from slipstream.diagnose.trace import Kind, Trace

FLOOR_PCT = 1.0
"""Findings below this share of the device's time are not worth a line."""
_WHOLE_PCT = 50.0
"""PyTorch numbers operators one by one; a file with fewer of them than this is a sample."""
_MIN_OPERATORS = 50

Found = Iterable[Finding | Abstention]


@dataclass(frozen=True, kw_only=True)
class View:
    """A rank and what the finders need of it."""

    account: Account
    """What was counted."""
    position: int
    """Which of the job's traces it is."""

    @property
    def trace(self) -> Trace:
        """The trace."""
        return self.account.trace

    @property
    def num_steps(self) -> int:
        """Steps marked; 0 without."""
        return len(self.account.steps)

    @property
    def per(self) -> Literal["step", "file"]:
        """What milliseconds are counted over."""
        return "step" if self.num_steps else "file"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank's number, if known."""
        return () if self.trace.rank is None else (self.trace.rank,)

    @cached_property
    def kernels(self) -> np.ndarray:
        """Indices of the kernels."""
        return self.trace.of_kind(Kind.KERNEL)

    @cached_property
    def is_communication(self) -> np.ndarray:
        """bool per kernel."""
        by_name = np.array([info.is_communication for info in self.account.infos], dtype=bool)
        return by_name[self.trace.name[self.kernels]]

    @cached_property
    def compute(self) -> np.ndarray:
        """Union of the kernels that are not communication."""
        return intervals.union(self.trace.intervals(self.kernels[~self.is_communication]))

    @cached_property
    def communication(self) -> np.ndarray:
        """Union of the communication kernels."""
        return intervals.union(self.trace.intervals(self.kernels[self.is_communication]))

    @cached_property
    def exposed_communication(self) -> np.ndarray:
        """Union of the time in which only communication runs."""
        return intervals.subtract(self.communication, self.compute)

    @cached_property
    def operators(self) -> np.ndarray:
        """int64 per kernel: the operator that caused it, -1 if not known."""
        return self.operators_of(self.kernels)

    def operators_of(self, device: np.ndarray) -> np.ndarray:
        """int64 per kernel or copy: the operator that caused it, -1 if not known."""
        return operators_of(self.trace, device, self.account.launch[device])

    def enclosing_operators(self, events: np.ndarray) -> np.ndarray:
        """int64 per event, in order of start: the innermost operator around it, -1 without."""
        return enclosing(self.trace, self.trace.of_kind(Kind.CPU_OP), events)

    @cached_property
    def idle(self) -> Idle:
        """The idle time by cause."""
        return explain(self.trace)

    @cached_property
    def passages(self) -> np.ndarray:
        """Segments of ``idle`` that begin with the first work of a step other than the first."""
        device = self.trace.of_kind(Kind.KERNEL, Kind.COPY)
        launched = (self.account.launch[device] >= 0) & (self.trace.dur_ns[device] > 0)
        device = device[launched & (self.account.step[device] > 0)]
        issued = self.trace.start_ns[self.account.launch[device]]
        device = device[np.lexsort((issued, self.account.step[device]))]
        _, first = np.unique(self.account.step[device], return_index=True)
        return 1 + np.flatnonzero(np.isin(self.idle.first[1:], device[first]))

    def over_steps(self, by_gap: np.ndarray) -> float:
        """ns over all steps of what comes to ``by_gap`` (n-1,) in the gaps between segments.

        N steps in a row show N-1 passages from one to the next: nothing is seen of the host before
        the first device work. The missing passage is taken to cost what the others do on average.
        """
        shown = float(by_gap.sum())
        if self.num_steps < 2:
            return shown
        return shown + float(by_gap[self.passages - 1].sum()) / (self.num_steps - 1)

    def saved(self, *causes: Cause) -> tuple[float, float]:
        """ns saved without ``causes``, by replay: of all steps by ``over_steps``, and as shown."""
        if not any(cause is Cause.HOST or len(self.idle.spans[cause]) for cause in causes):
            return 0.0, 0.0
        by_gap = np.diff(saved_before(self.idle, frozenset(causes)))
        return max(0.0, self.over_steps(by_gap)), float(by_gap.sum())

    @cached_property
    def origin_ns(self) -> int:
        """Start of the first device work."""
        device = self.trace.of_kind(Kind.KERNEL, Kind.COPY)
        return int(self.trace.start_ns[device[0]])

    @cached_property
    def recorded_pct(self) -> float | None:
        """Share of the host operators that are in the file, by their numbers; None if unknown."""
        operators = self.trace.of_kind(Kind.CPU_OP)
        numbers = np.sort(self.trace.external[operators], kind="stable")
        numbers = numbers[numbers >= 0]
        if len(numbers) < _MIN_OPERATORS:
            return None
        distinct = 1 + np.count_nonzero(np.diff(numbers))
        return 100.0 * distinct / float(numbers[-1] - numbers[0] + 1)

    @cached_property
    def host_unknown(self) -> str | None:
        """Why causes on the host cannot be told; None if they can."""
        if not len(self.trace.of_kind(Kind.CPU_OP)):
            return "the trace has no host operators"
        if not (self.account.launch[self.kernels] >= 0).any():
            return "the trace does not tell which call launched which kernel"
        if self.recorded_pct is not None and self.recorded_pct < _WHOLE_PCT:
            return f"the file is a sample: it holds {self.recorded_pct:.1f} % of the host operators"
        return None

    def finding(
        self,
        name: str,
        total_ns: float,
        title: str,
        *,
        confidence: Confidence,
        evidence: dict[str, Value],
        kernels: tuple[str, ...] = (),
        where: np.ndarray | None = None,
        detail: str = "",
        ranks: tuple[int, ...] | None = None,
        always: bool = False,
        passages: bool = False,
    ) -> list[Finding]:
        """The finding, as a list of one; empty if below ``FLOOR_PCT`` and not ``always``.

        ``total_ns`` is over the whole file, by ``over_steps`` if ``passages``; ``where``: one
        interval to look at, ns.
        """
        span = self.account.split.span_ns
        if passages:
            gaps = self.idle.gaps
            span += self.over_steps(gaps[:, 1] - gaps[:, 0]) - self.idle.total_ns
        pct = 100.0 * total_ns / span if span else 0.0
        if pct < FLOOR_PCT and not always:
            return []
        window = None if where is None else ((where - self.origin_ns) / 1e6).tolist()
        return [
            Finding(
                id=name,
                title=title,
                ms=float(total_ns) / 1e6 / max(1, self.num_steps),
                per=self.per,
                pct=float(pct),
                confidence=confidence,
                evidence=evidence,
                kernels=kernels,
                start_ms=window[0] if window else None,
                end_ms=window[1] if window else None,
                ranks=self.ranks if ranks is None else ranks,
                detail=detail,
            )
        ]

    def top_names(self, events: np.ndarray, weight_ns: np.ndarray, num: int = 3) -> tuple[str, ...]:
        """Names of the events with the largest sums of ``weight_ns``."""
        sums = np.bincount(
            self.trace.name[events], weights=weight_ns, minlength=len(self.trace.names)
        )
        order = np.argsort(-sums, kind="stable")[:num]
        return tuple(self.trace.names[row] for row in order if sums[row] > 0)


def longest(spans: np.ndarray) -> np.ndarray | None:
    """The longest interval of a union, None of an empty one."""
    return spans[np.argmax(spans[:, 1] - spans[:, 0])] if len(spans) else None


def ms(total_ns: float) -> float:
    """Milliseconds, rounded to nanoseconds."""
    return round(float(total_ns) / 1e6, 6)
