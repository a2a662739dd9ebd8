"""Sets of half-open time intervals as sorted int64 arrays of shape (n, 2).

A union (what ``union`` returns) is sorted, disjoint, without empty or touching intervals; the
other functions take and return unions.
"""

from collections.abc import Callable

import numpy as np

EMPTY = np.empty((0, 2), dtype=np.int64)
_Keep = Callable[[np.ndarray, np.ndarray], np.ndarray]


def union(intervals: np.ndarray) -> np.ndarray:
    """The union of any intervals: sorted, disjoint; empty ones vanish, touching ones merge."""
    spans = intervals[intervals[:, 1] > intervals[:, 0]]
    if not len(spans):
        return EMPTY
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate([[True], spans[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([spans[first, 0], reach[last]], axis=1)


def measure(spans: np.ndarray) -> int:
    """Total length of a union, ns."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def subtract(spans: np.ndarray, holes: np.ndarray) -> np.ndarray:
    """What of the union ``spans`` lies outside the union ``holes``."""
    return _combine(spans, holes, lambda a, b: a & ~b)


def intersect(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What lies in both unions."""
    return _combine(a, b, lambda x, y: x & y)


def clip(spans: np.ndarray, start_ns: int, end_ns: int) -> np.ndarray:
    """The part of a union inside [start_ns, end_ns)."""
    if end_ns <= start_ns:
        return EMPTY
    first = np.searchsorted(spans[:, 1], start_ns, side="right")
    last = np.searchsorted(spans[:, 0], end_ns, side="left")
    return np.clip(spans[first:last], start_ns, end_ns)


def gaps(spans: np.ndarray) -> np.ndarray:
    """The intervals between those of a union."""
    return np.stack([spans[:-1, 1], spans[1:, 0]], axis=1) if len(spans) > 1 else EMPTY


def covered(spans: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """int64 per query interval: how much of [start_ns, end_ns) the union covers, ns."""
    return _below(spans, end_ns) - _below(spans, start_ns)


def _below(spans: np.ndarray, at_ns: np.ndarray) -> np.ndarray:
    """How much of the union lies before each time."""
    lengths = spans[:, 1] - spans[:, 0]
    before = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    row = np.searchsorted(spans[:, 0], at_ns, side="right")
    if not len(spans):
        return np.zeros_like(at_ns)
    over = np.maximum(spans[np.maximum(row - 1, 0), 1] - at_ns, 0)
    return before[row] - np.where(row > 0, over, 0)


def _combine(a: np.ndarray, b: np.ndarray, keep: _Keep) -> np.ndarray:
    """The times where ``keep(inside a, inside b)`` holds, as a union."""
    # Sorting is several times faster than numpy's unique, and empty pieces vanish in ``union``.
    edges = np.sort(np.concatenate([a.ravel(), b.ravel()]), kind="stable")
    starts, ends = edges[:-1], edges[1:]
    inside = keep(_contains(a, starts), _contains(b, starts))
    return union(np.stack([starts[inside], ends[inside]], axis=1))


def _contains(spans: np.ndarray, at_ns: np.ndarray) -> np.ndarray:
    """bool: whether each time lies inside the union."""
    if not len(spans):
        return np.zeros(len(at_ns), dtype=bool)
    row = np.searchsorted(spans[:, 0], at_ns, side="right") - 1
    return (row >= 0) & (at_ns < spans[np.maximum(row, 0), 1])
