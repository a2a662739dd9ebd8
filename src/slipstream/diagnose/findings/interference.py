"""Kernels that take longer because something runs beside them."""

import numpy as np

from slipstream.diagnose import intervals
from slipstream.diagnose.classify import KernelClass
from slipstream.diagnose.findings.context import Found, View, ms
from slipstream.diagnose.findings.model import Confidence, Value

_PRODUCTS = frozenset({KernelClass.GEMM, KernelClass.GROUPED_GEMM, KernelClass.CONVOLUTION})
_MIN_EACH = 5
"""Fewer kernels on a side cannot pass the rank test at 1 %."""
_Z = 2.326
"""One-sided normal quantile of 1 %."""


def slowed_products(view: View) -> Found:
    """Matrix products beside communication against the same ones alone."""
    products = np.array([info.klass in _PRODUCTS for info in view.account.infos], dtype=bool)
    kernels = view.kernels[products[view.trace.name[view.kernels]]]
    covered = intervals.covered(
        view.communication, view.trace.start_ns[kernels], view.trace.end_ns[kernels]
    )
    yield from _slowed(
        view,
        kernels,
        covered,
        "gemm-slowed-by-communication",
        "matrix products slowed by communication beside them",
    )


def competing_streams(view: View) -> Found:
    """Compute kernels beside those of another stream against the same ones alone."""
    trace = view.trace
    kernels = view.kernels[~view.is_communication]
    streams = trace.device[kernels].astype(np.int64) << 32 | (trace.stream[kernels] + 1)
    if len(np.unique(streams)) < 2:
        return
    covered = np.zeros(len(kernels), dtype=np.int64)
    for stream in np.unique(streams):
        mine = streams == stream
        others = intervals.union(trace.intervals(kernels[~mine]))
        own = kernels[mine]
        covered[mine] = intervals.covered(others, trace.start_ns[own], trace.end_ns[own])
    yield from _slowed(
        view, kernels, covered, "streams-competing", "compute streams slow each other"
    )


def _slowed(view: View, kernels: np.ndarray, covered: np.ndarray, name: str, title: str) -> Found:
    trace = view.trace
    lost, slow_ns, rows = 0.0, 0, []
    for same in _alike(view, kernels):
        duration = trace.dur_ns[kernels[same]]
        beside = 2 * covered[same] >= np.maximum(duration, 1)
        alone = covered[same] == 0
        if min(beside.sum(), alone.sum()) < _MIN_EACH:
            continue
        z = rank_test(duration[beside], duration[alone])
        more = duration[beside] - np.median(duration[alone])
        if z < _Z or more.sum() <= 0:
            continue
        lost += float(more.sum())
        slow_ns += int(duration[beside].sum())
        ratio = float(np.median(duration[beside]) / max(1.0, float(np.median(duration[alone]))))
        rows.append((float(more.sum()), int(kernels[same][0]), ratio, spread(duration[alone])))
    if not rows:
        return
    rows.sort(reverse=True)
    evidence: dict[str, Value] = {
        "groups_of_equal_kernels": len(rows),
        "slowed_kernels_ms": ms(slow_ns),
        "median_slowdown": round(rows[0][2], 3),
        "spread_alone_pct": round(rows[0][3], 1),
    }
    yield from view.finding(
        name,
        lost,
        title,
        confidence=Confidence.MEDIUM,
        evidence=evidence,
        kernels=tuple(trace.name_of(row[1]) for row in rows[:3]),
    )


def _alike(view: View, kernels: np.ndarray) -> list[np.ndarray]:
    """Positions of kernels of one name, launch arguments and operator shape, enough for a test."""
    trace = view.trace
    owners = view.operators[np.searchsorted(view.kernels, kernels)]
    shape = np.where(owners >= 0, trace.detail[owners], -1)
    key = np.stack([trace.name[kernels], trace.detail[kernels], shape], axis=1)
    order = np.lexsort(key.T)
    cuts = np.flatnonzero((np.diff(key[order], axis=0) != 0).any(axis=1)) + 1
    return [one for one in np.split(order, cuts) if len(one) >= 2 * _MIN_EACH]


def rank_test(larger: np.ndarray, smaller: np.ndarray) -> float:
    """Normal score of the Mann-Whitney statistic: how clearly ``larger`` lies above ``smaller``.

    Mid-ranks and the tie correction of the variance; 0 if all values are equal.
    """
    n, m = len(larger), len(smaller)
    values = np.concatenate([larger, smaller])
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    u = ranks[:n].sum() - n * (n + 1) / 2
    ties = float((counts.astype(float) ** 3 - counts).sum())
    total = n + m
    variance = n * m / 12 * (total + 1 - ties / (total * (total - 1)))
    return float((u - n * m / 2) / variance**0.5) if variance > 0 else 0.0


def spread(values: np.ndarray) -> float:
    """p90 less p10 as a percentage of the median."""
    low, middle, high = np.percentile(values, [10, 50, 90])
    return float(100 * (high - low) / middle) if middle else 0.0
