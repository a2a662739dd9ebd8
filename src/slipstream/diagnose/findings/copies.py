"""Copies that run while no kernel does."""

from collections import Counter

import numpy as np

from slipstream.diagnose import intervals
from slipstream.diagnose.findings.context import Found, View, longest, ms
from slipstream.diagnose.findings.model import Confidence, Value
from slipstream.diagnose.trace import Kind

_DIRECTIONS = (
    ("memset", r"memset"),
    ("host_to_device", r"HtoD|Host(ToDevice)? ?-> ?Device|HostToDevice"),
    ("device_to_host", r"DtoH|DeviceToHost"),
    ("device_to_device", r"DtoD|DeviceToDevice|CopyDeviceToDevice"),
    ("peer_to_peer", r"PtoP|Peer"),
)


def exposed(view: View) -> Found:
    """Exposed copies by direction."""
    trace, split = view.trace, view.account.split
    copies = trace.of_kind(Kind.COPY)
    if not len(copies):
        return
    busy = intervals.union(trace.intervals(view.kernels))
    alone = intervals.subtract(intervals.union(trace.intervals(copies)), busy)
    covered = intervals.covered(alone, trace.start_ns[copies], trace.end_ns[copies])
    evidence: dict[str, Value] = {
        "exposed_ms": ms(split.exposed_copies_ns),
        "exposed_pct": round(split.pct(split.exposed_copies_ns), 2),
        "copies": len(copies),
    }
    known = np.zeros(len(copies), dtype=bool)
    for name, pattern in _DIRECTIONS:
        mine = trace.named(pattern)[trace.name[copies]] & ~known
        known |= mine
        if covered[mine].sum():
            evidence[f"exposed_{name}_ms"] = ms(covered[mine].sum())
    pageable = trace.named("pageable")[trace.name[copies]]
    if pageable.any():
        evidence["pageable_ms"] = ms(covered[pageable].sum())
    small = _small(view, copies)
    if small is not None:
        evidence["below_64_kib_pct"] = small
    yield from view.finding(
        "exposed-copies",
        split.exposed_copies_ns,
        "copies while no kernel runs",
        confidence=Confidence.HIGH,
        evidence=evidence | _callers(view, copies, covered),
        kernels=view.top_names(copies, covered),
        where=longest(alone),
    )


def _small(view: View, copies: np.ndarray) -> float | None:
    """Share of copies too small to be worth one each; None if sizes are not given."""
    sizes = [view.trace.args(event).get("bytes") for event in copies.tolist()]
    known = [size for size in sizes if isinstance(size, int | float)]
    if not known:
        return None
    return round(100.0 * sum(size < 65536 for size in known) / len(known), 1)


def _callers(view: View, copies: np.ndarray, covered: np.ndarray) -> dict[str, Value]:
    """Operators that caused the most exposed copying."""
    trace = view.trace
    largest = copies[np.argsort(-covered, kind="stable")[:2000]]
    part = dict(zip(copies.tolist(), covered.tolist(), strict=True))
    sums: Counter[str] = Counter()
    operators = view.operators_of(largest)
    for event, operator in zip(largest.tolist(), operators.tolist(), strict=True):
        if operator >= 0:
            sums[trace.name_of(operator)] += part[event]
    return {"called_from": [name for name, _ in sums.most_common(3)]} if sums else {}
