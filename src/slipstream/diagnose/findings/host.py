"""The host as the limit: idle time by cause, and what each cause would bring if it were gone."""

from collections import Counter

import numpy as np

from slipstream.diagnose import intervals
from slipstream.diagnose.findings.context import Found, View, longest, ms
from slipstream.diagnose.findings.model import Abstention, Confidence, Value
from slipstream.diagnose.idle import HOST_CAUSES, Cause, synchronisations
from slipstream.diagnose.operators import python_line
from slipstream.diagnose.trace import Kind

SPECIFIC = {
    Cause.SYNC: ("host-synchronisation", "the host waits for the device, then the device for it"),
    Cause.DATA: ("data-loading", "the step waits for its batch"),
    Cause.COLLECTION: ("garbage-collection", "Python collects garbage inside the step"),
    Cause.ALLOCATOR: ("allocator", "device memory is allocated or freed inside the step"),
}
HOST_FINDINGS = ("launch-bound", "host-bound", *(name for name, _ in SPECIFIC.values()))
_SHORT_PCT = 50.0


def causes(view: View) -> Found:
    """Every host cause of idle time, and what stays unexplained."""
    if view.host_unknown is not None:
        for name in HOST_FINDINGS:
            yield Abstention(name, view.host_unknown)
        yield from _unexplained(view, view.idle.total_ns, view.host_unknown)
        return
    for cause in SPECIFIC:
        yield from _specific(view, cause)
    yield from _remaining(view)
    queued, unknown = view.idle.ns(Cause.QUEUED), view.idle.ns(Cause.UNKNOWN)
    why = "the work was issued before the gap began, or its launch is not in the trace"
    yield from _unexplained(view, queued + unknown, why)


def _specific(view: View, cause: Cause) -> Found:
    idle = view.idle
    name, words = SPECIFIC[cause]
    saved, shown = view.saved(cause)
    if not saved:
        return
    evidence: dict[str, Value] = {
        "idle_inside_ms": ms(idle.ns(cause)),
        "saved_by_replay_ms": ms(shown),
    }
    seen = idle.by_cause[cause]
    if cause is Cause.SYNC:
        # The device ran dry because the host waited, so it idles until the next launch for that.
        after = np.where(idle.opened_by_wait, idle.by_cause[Cause.HOST], 0)
        evidence["idle_until_next_launch_ms"] = ms(after.sum())
        seen = seen + after
    calls = _calls(view, cause)
    evidence["ranges"] = len(calls)
    evidence |= _lines(view, calls)
    spans = intervals.clip(idle.spans[cause], int(idle.segments[0, 0]), int(idle.segments[-1, 1]))
    yield from view.finding(
        name,
        saved,
        words,
        # At least half of it is seen directly: the device is idle while the host is inside.
        confidence=(Confidence.HIGH if 2 * view.over_steps(seen) >= saved else Confidence.MEDIUM),
        evidence=evidence,
        kernels=view.top_names(calls, view.trace.dur_ns[calls]),
        where=longest(spans),
        passages=True,
    )


def _remaining(view: View) -> Found:
    """What issuing work costs when all specific causes are gone: launch-bound or host-bound."""
    idle, stats = view.idle, view.account.kernels
    saved = view.saved(*HOST_CAUSES, Cause.HOST)[0] - view.saved(*HOST_CAUSES)[0]
    if stats is None or saved <= 0:
        return
    short = stats.short_pct >= _SHORT_PCT and stats.median_gap_ns > stats.median_ns
    late = idle.gaps[idle.late]
    evidence: dict[str, Value] = {
        "idle_pct": round(view.account.split.pct(view.account.split.idle_ns), 2),
        "idle_before_late_launches_ms": ms(idle.ns(Cause.HOST)),
        "kernels_below_10_us_pct": round(stats.short_pct, 2),
        "median_kernel_us": round(stats.median_ns / 1e3, 2),
        "median_gap_us": round(stats.median_gap_ns / 1e3, 2),
        "median_launch_us": round(_launch_ns(view) / 1e3, 2),
        "gaps_before_late_launches_pct": round(100 * float(np.mean(idle.late)), 1),
        "kernels_per_step": round(stats.num / max(1, view.num_steps)),
    }
    names = view.top_names(idle.first[1:], idle.by_cause[Cause.HOST])
    busiest = _busiest_operators(view, late)
    if busiest:
        evidence["host_operators"] = busiest
    words = "kernels too short to hide their launches" if short else "the device waits for the host"
    yield from view.finding(
        "launch-bound" if short else "host-bound",
        saved,
        words,
        # Launches can be made nearly free (a graph of them), Python and operators cannot.
        confidence=Confidence.HIGH if short else Confidence.MEDIUM,
        evidence=evidence,
        kernels=names,
        where=longest(late),
        detail=_silence(view),
        passages=True,
    )


def _launch_ns(view: View) -> float:
    """Median duration of the calls that launched kernels."""
    calls = view.account.launch[view.kernels]
    return float(np.median(view.trace.dur_ns[calls[calls >= 0]]))


def _unexplained(view: View, total_ns: int, why: str) -> Found:
    yield from view.finding(
        "idle-unexplained",
        total_ns,
        "idle, and the trace does not show why",
        confidence=Confidence.LOW,
        evidence={
            "idle_ms": ms(view.account.split.idle_ns),
            "idle_pct": round(view.account.split.pct(view.account.split.idle_ns), 2),
        },
        where=longest(view.idle.gaps),
        detail=f"{why[0].upper()}{why[1:]}.",
    )


def _calls(view: View, cause: Cause) -> np.ndarray:
    """The host events that make up a cause, inside the device's span."""
    trace, idle = view.trace, view.idle
    if cause is Cause.SYNC:
        device = trace.of_kind(Kind.KERNEL, Kind.COPY)
        calls = synchronisations(trace, idle.threads, device, view.account.launch[device])
    else:
        calls = np.flatnonzero(idle.matches(cause))
    begin, end = int(idle.segments[0, 0]), int(idle.segments[-1, 1])
    return calls[(trace.end_ns[calls] > begin) & (trace.start_ns[calls] < end)]


def _lines(view: View, calls: np.ndarray) -> dict[str, Value]:
    """The Python lines and operators the longest calls came from."""
    trace = view.trace
    longest_calls = calls[np.argsort(-trace.dur_ns[calls], kind="stable")[:8]]
    lines: Counter[str] = Counter()
    for call in longest_calls.tolist():
        line = python_line(trace, call)
        if line is not None:
            lines[line] += int(trace.dur_ns[call])
    evidence: dict[str, Value] = {}
    if lines:
        evidence["python_lines"] = [line for line, _ in lines.most_common(3)]
    operators = view.enclosing_operators(np.sort(longest_calls))
    names = sorted({trace.name_of(row) for row in operators.tolist() if row >= 0})
    if names:
        evidence["operators"] = names[:3]
    return evidence


def _busiest_operators(view: View, late: np.ndarray) -> list[str]:
    """Outermost operators that the host was in for most of the late gaps."""
    trace = view.trace
    operators = trace.of_kind(Kind.CPU_OP)
    sums: Counter[str] = Counter()
    for thread in view.idle.threads.tolist():
        mine = operators[trace.thread[operators] == thread]
        if not len(mine):
            continue
        reach = np.maximum.accumulate(trace.end_ns[mine])
        outer = mine[np.concatenate([[True], trace.start_ns[mine[1:]] >= reach[:-1]])]
        inside = intervals.covered(late, trace.start_ns[outer], trace.end_ns[outer])
        for row, part in zip(outer.tolist(), inside.tolist(), strict=True):
            sums[trace.name_of(row)] += part
    return [f"{name} {part / 1e6:.3g} ms" for name, part in sums.most_common(3) if part]


def _silence(view: View) -> str:
    """How much of the late time the host spends outside of all operators and calls."""
    trace, idle = view.trace, view.idle
    shown = np.isin(trace.kind, (Kind.CPU_OP, Kind.RUNTIME))
    shown &= np.isin(trace.thread, idle.threads)
    active = intervals.union(trace.intervals(np.flatnonzero(shown)))
    late = intervals.union(idle.gaps[idle.late])
    silent = intervals.measure(intervals.subtract(late, active))
    whole = intervals.measure(late)
    if not whole:
        return ""
    return (
        f"For {100 * silent / whole:.0f} % of the time it is late the host is in no operator or "
        "call: Python, or something outside of PyTorch."
    )
