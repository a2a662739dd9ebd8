"""Which operator or Python line an event belongs to, from how ranges nest on their thread."""

import numpy as np

from slipstream.diagnose.trace import Kind, Trace


def enclosing(trace: Trace, candidates: np.ndarray, events: np.ndarray) -> np.ndarray:
    """int64: for each event the innermost of ``candidates`` around its start, -1 without.

    Both are indices in order of start; a candidate encloses only what is on its own thread. Ranges
    of one thread nest, as those of operators and calls do.
    """
    found = np.full(len(events), -1, dtype=np.int64)
    for thread in np.unique(trace.thread[events]):
        mine = np.flatnonzero(trace.thread[events] == thread)
        around = candidates[trace.thread[candidates] == thread]
        if len(around):
            row = _innermost(trace, around, events[mine])
            found[mine] = np.where(row >= 0, around[np.maximum(row, 0)], -1)
    return found


def _innermost(trace: Trace, around: np.ndarray, events: np.ndarray) -> np.ndarray:
    """Rows of ``around``, -1 without."""
    end = trace.end_ns[around]
    start = trace.start_ns[around]
    parent = _climb(np.arange(len(around)) - 1, end, start, None)
    at = trace.start_ns[events]
    # An event comes after its enclosers in the order of the trace; equal starts are then right too.
    row = np.searchsorted(around, events, side="left") - 1
    return _climb(row, end, at, parent)


def _climb(
    row: np.ndarray, end: np.ndarray, at_ns: np.ndarray, parent: np.ndarray | None
) -> np.ndarray:
    """Go up from ``row`` until the range reaches beyond ``at_ns``; without ``parent`` the rows
    are the parents sought, and every round doubles the height climbed."""
    row = row.copy()
    while True:
        low = np.flatnonzero(row >= 0)
        low = low[end[row[low]] <= at_ns[low]]
        if not len(low):
            return row
        row[low] = (row if parent is None else parent)[row[low]]


def operators_of(trace: Trace, kernels: np.ndarray, launch: np.ndarray) -> np.ndarray:
    """int64: the operator that caused each kernel, -1 if not known.

    By the number PyTorch gives both; else the innermost operator around the launching call.
    ``launch``: int64 per kernel, index of that call, -1 without.
    """
    operators = trace.of_kind(Kind.CPU_OP)
    found = np.full(len(kernels), -1, dtype=np.int64)
    known = launch >= 0
    found[known] = _unsorted(trace, operators, launch[known])
    numbered = operators[trace.external[operators] >= 0]
    if not len(numbered):
        return found
    order = numbered[np.argsort(trace.external[numbered], kind="stable")]
    keys, wanted = trace.external[order], trace.external[kernels]
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    equal = (wanted >= 0) & (keys[at] == wanted) & (found < 0)
    return np.where(equal, order[at], found)


def _unsorted(trace: Trace, candidates: np.ndarray, events: np.ndarray) -> np.ndarray:
    order = np.argsort(events, kind="stable")
    found = np.empty(len(events), dtype=np.int64)
    found[order] = enclosing(trace, candidates, events[order])
    return found


def python_line(trace: Trace, event: int) -> str | None:
    """The innermost Python frame of the user's own code around an event, None if none is known."""
    at = trace.start_ns[event]
    frames = trace.of_kind(Kind.PYTHON)
    frames = frames[(trace.start_ns[frames] <= at) & (trace.end_ns[frames] > at)]
    frames = frames[trace.thread[frames] == trace.thread[event]]
    foreign = ("<built-in", "torch/", "nn.Module:", "threading.py", "<frozen")
    for frame in frames[::-1].tolist():
        name = trace.name_of(frame)
        if not name.startswith(foreign) and "/site-packages/torch/" not in name:
            return name
    return None
