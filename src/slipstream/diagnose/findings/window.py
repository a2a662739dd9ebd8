"""Whether the trace shows steady steps at all."""

from statistics import median

import numpy as np

from slipstream.diagnose.findings.context import Found, View, longest, ms
from slipstream.diagnose.findings.model import Confidence, Finding, Value
from slipstream.diagnose.idle import Cause

_SLOW_FIRST = 1.5
"""Steady steps vary less than this from their median."""
_SLOW_FIRST_NS = 1_000_000
_HALF_PCT = 50.0


def not_steady(view: View) -> Finding | None:
    """The finding that rules out all others: a start-up, or something that happens once."""
    split, stats = view.account.split, view.account.kernels
    if view.num_steps > 1 or stats is None:
        return None
    gap = split.pct(stats.longest_gap_ns)
    idle = view.idle
    start_up = split.pct(idle.ns(Cause.SETUP) + idle.ns(Cause.ALLOCATOR))
    if max(gap, start_up) < _HALF_PCT:
        return None
    widest = idle.gaps[np.argmax(idle.gaps[:, 1] - idle.gaps[:, 0])]
    found = view.finding(
        "not-a-training-window",
        0,
        "the trace is not of steady steps: the device is idle for "
        f"{split.pct(split.idle_ns):.2f} % of it",
        confidence=Confidence.HIGH,
        evidence={
            "idle_pct": round(split.pct(split.idle_ns), 2),
            "longest_gap_ms": ms(stats.longest_gap_ns),
            "longest_gap_pct": round(gap, 2),
            "allocation_and_loading_pct": round(start_up, 2),
            "steps": view.num_steps,
        },
        where=widest,
        always=True,
    )
    return found[0]


def warm_up(view: View) -> Found:
    """A first step that takes much longer than the others, or kernels made inside the window."""
    slow, made = _slow_first(view), 0.0
    if view.host_unknown is None:
        made, _ = view.saved(Cause.SETUP)
    times = [ms(step.host_ns) for step in view.account.steps]
    evidence: dict[str, Value] = {
        "loading_and_compiling_ms": ms(view.idle.ns(Cause.SETUP)),
        "allocating_ms": ms(view.idle.ns(Cause.ALLOCATOR)),
    }
    if slow > made:
        evidence |= {"first_step_ms": times[0], "median_of_others_ms": median(times[1:])}
        title = f"the first step takes {times[0] / median(times[1:]):.1f} times as long as others"
        first = view.account.steps[0]
        where = np.array([first.start_ns, first.end_ns], dtype=np.int64)
    else:
        title = "kernels are compiled or loaded inside the window"
        where = longest(view.idle.spans[Cause.SETUP])
    yield from view.finding(
        "warm-up-in-window",
        max(slow, made),
        title,
        confidence=Confidence.HIGH if slow > made else Confidence.MEDIUM,
        evidence=evidence,
        where=where,
    )


def _slow_first(view: View) -> float:
    """ns the first step takes beyond the median of the others; 0 if that is within their spread."""
    times = [float(step.host_ns) for step in view.account.steps]
    if len(times) < 3:
        return 0.0
    usual = median(times[1:])
    excess = times[0] - usual
    return excess if times[0] > _SLOW_FIRST * usual and excess >= _SLOW_FIRST_NS else 0.0
