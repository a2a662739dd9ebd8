"""Steps of a trace, the call that launched each kernel, and the step each kernel belongs to."""

import re
from dataclasses import dataclass

import numpy as np

from slipstream.diagnose.trace import Kind, Trace

_STEPS = (
    re.compile(r"^ProfilerStep#(\d{1,18})$"),
    re.compile(r"^(?:train(?:ing)?[ _])?(?:step|iter(?:ation)?)[ _#:=]*(\d{1,18})$", re.IGNORECASE),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStep:
    """One ``ProfilerStep#N`` range, or one named ``step N`` or ``iteration N``."""

    number: int
    """N."""
    start_ns: int
    """Start on the host."""
    end_ns: int
    """End on the host."""


def host_steps(trace: Trace) -> list[HostStep]:
    """The profiler's steps, else ranges the program names so, in order of time.

    Of several ranges of one number the longest counts. Ranges on the device stand in where the
    host has none.
    """
    for pattern in _STEPS:
        found = ((index, pattern.match(name)) for index, name in enumerate(trace.names))
        numbers = {index: int(match[1]) for index, match in found if match}
        named = np.isin(trace.name, np.array(list(numbers), dtype=np.int32))
        for kinds in ((Kind.ANNOTATION, Kind.CPU_OP), (Kind.GPU_ANNOTATION,)):
            events = np.flatnonzero(named & np.isin(trace.kind, np.array(kinds, dtype=np.uint8)))
            if len(events):
                return _longest(trace, events, numbers)
    return []


def _longest(trace: Trace, events: np.ndarray, numbers: dict[int, int]) -> list[HostStep]:
    """The longest of the ranges of each number; ``numbers`` by index of the name."""
    longest: dict[int, int] = {}
    for event in events[np.argsort(trace.dur_ns[events], kind="stable")].tolist():
        longest[numbers[int(trace.name[event])]] = event
    steps = [
        HostStep(
            number=number,
            start_ns=int(trace.start_ns[event]),
            end_ns=int(trace.start_ns[event] + trace.dur_ns[event]),
        )
        for number, event in longest.items()
    ]
    return sorted(steps, key=lambda step: (step.start_ns, step.number))


def launches(trace: Trace) -> np.ndarray:
    """int64 per event: of kernels and copies the runtime call that launched it (by correlation),
    else the operator that caused it (by external id), else -1.
    """
    launch = np.full(len(trace), -1, dtype=np.int64)
    device = trace.of_kind(Kind.KERNEL, Kind.COPY)
    launch[device] = _lookup(trace.correlation[device], trace.correlation, trace, Kind.RUNTIME)
    missing = device[launch[device] < 0]
    launch[missing] = _lookup(trace.external[missing], trace.external, trace, Kind.CPU_OP)
    return launch


def _lookup(keys: np.ndarray, column: np.ndarray, trace: Trace, kind: Kind) -> np.ndarray:
    """int64: index of the first event of a kind with each key in the column, -1 if none."""
    events = trace.of_kind(kind)
    events = events[column[events] >= 0]
    if not len(events) or not len(keys):
        return np.full(len(keys), -1, dtype=np.int64)
    values, first = np.unique(column[events], return_index=True)
    row = np.minimum(np.searchsorted(values, keys), len(values) - 1)
    return np.where((values[row] == keys) & (keys >= 0), events[first[row]], -1)


def step_of_events(trace: Trace, launch: np.ndarray, steps: list[HostStep]) -> np.ndarray:
    """int32 per event: of kernels and copies the position in ``steps``, else -1.

    The time of the launch decides. Events whose launch the trace lacks go by their own time, but
    those before the first launched kernel belong to an earlier, unseen step.
    """
    step = np.full(len(trace), -1, dtype=np.int32)
    if not steps:
        return step
    device = trace.of_kind(Kind.KERNEL, Kind.COPY)
    launched = launch[device] >= 0
    at_ns = np.where(launched, trace.start_ns[launch[device]], trace.start_ns[device])
    starts = np.array([one.start_ns for one in steps], dtype=np.int64)
    ends = np.array([one.end_ns for one in steps], dtype=np.int64)
    row = np.searchsorted(starts, at_ns, side="right") - 1
    inside = (row >= 0) & (at_ns < ends[np.maximum(row, 0)])
    if launched.any():
        first = trace.start_ns[device[launched]].min()
        inside &= launched | (trace.start_ns[device] >= first)
    step[device] = np.where(inside, row, -1)
    return step


def events_by_step(trace: Trace, step: np.ndarray, steps: list[HostStep]) -> list[np.ndarray]:
    """The kernels and copies of each step, in order of start."""
    device = trace.of_kind(Kind.KERNEL, Kind.COPY)
    order = np.argsort(step[device], kind="stable")
    bounds = np.searchsorted(step[device][order], np.arange(len(steps) + 1))
    return [device[order[bounds[at] : bounds[at + 1]]] for at in range(len(steps))]


def step_stretches(
    trace: Trace, events: list[np.ndarray], launch: np.ndarray, steps: list[HostStep]
) -> list[tuple[int, int]]:
    """Per step its stretch of device time, ns: from the first kernel it launched to the first of
    the next step; to its own last end where the next step is missing. Empty without kernels.
    """
    first, last = [], []
    for mine in events:
        mine = mine[trace.kind[mine] == Kind.KERNEL]
        launched = mine[launch[mine] >= 0]
        mine = launched if len(launched) else mine
        first.append(int(trace.start_ns[mine].min()) if len(mine) else None)
        ends = trace.start_ns[mine] + trace.dur_ns[mine]
        last.append(int(ends.max()) if len(mine) else None)
    stretches = []
    for position, (start, end) in enumerate(zip(first, last, strict=True)):
        following = first[position + 1] if position + 1 < len(steps) else None
        adjacent = (
            following is not None and steps[position + 1].number == steps[position].number + 1
        )
        if start is None or end is None:
            stretches.append((steps[position].start_ns, steps[position].start_ns))
        else:
            stretches.append((start, max(start, following if adjacent else end)))
    return stretches
