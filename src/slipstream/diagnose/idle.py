"""Why a device was idle: every gap is split by what the host did before it issued the next work.

Device work is a list of busy segments. The work that ends a gap was issued by a runtime call; if
that came after the gap began, the host was late, and the time until the call goes to what the
launching threads were doing. What removing a cause would bring is another question (a host that is
not held up runs ahead): ``replay`` answers it.
"""

import enum
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slipstream.diagnose import intervals
from slipstream.diagnose.trace import Kind, Trace

LAUNCH_NS = 10_000
"""A launch costs the host 3 to 10 us: a kernel shorter than this cannot hide the next launch, and a
synchronisation shorter than this has not waited."""

SILENCE_NS = 1_000_000
"""Python between two steps rarely takes this long without an operator, unless it fetches data."""

_SYNC = (
    r"^(cuda|hip)(Device|Stream|Event)Synchronize|^cu(Ctx|Stream|Event)Synchronize|"
    r"^(cuda|hip)Memcpy(?!.*Async)"
)


class Cause(enum.StrEnum):
    """What kept the device waiting."""

    PROFILER = "profiler"
    """The profiler itself, flushing its buffers."""
    SETUP = "set-up"
    """Kernels were being loaded or compiled."""
    ALLOCATOR = "allocator"
    """A call that allocates or frees device or pinned memory; most of them wait for the device."""
    COLLECTION = "garbage collection"
    """Python collected garbage."""
    DATA = "data loading"
    """The program waited for a batch."""
    SYNC = "synchronisation"
    """The host was inside a call that waits for the device."""
    HOST = "host work"
    """The host was on its way to the launch: Python, operators, the launch itself."""
    QUEUED = "queued"
    """The work had been issued in time: it waited for other work, or the gap is the device's."""
    UNKNOWN = "unknown"
    """The call that issued the work is not in the trace."""


HOST_CAUSES = (
    Cause.PROFILER,
    Cause.SETUP,
    Cause.ALLOCATOR,
    Cause.COLLECTION,
    Cause.DATA,
    Cause.SYNC,
)
"""Causes told by what a launching thread was inside of, the more specific first."""


_PYTHON = (Kind.CPU_OP, Kind.PYTHON, Kind.ANNOTATION)
_NAMES: dict[Cause, tuple[tuple[Kind, ...], str]] = {
    Cause.PROFILER: ((Kind.OVERHEAD,), r"^(?!.*loading)"),
    Cause.SETUP: (
        (Kind.RUNTIME, Kind.OVERHEAD, *_PYTHON),
        r"^(cu|hip)(ModuleLoad|LibraryLoad|LibraryGet)|^cudaStreamCreate|^TorchDynamo(?! Cache)|"
        r"OutputGraph|compile_fx|^triton.*compile|(function|module) loading",
    ),
    Cause.ALLOCATOR: (
        (Kind.RUNTIME,),
        r"^(cuda|hip)(Malloc|Free|HostAlloc|HostFree|HostRegister|HostUnregister)|"
        r"^cuMem(Alloc|Free|Create|Map|Unmap|Release|SetAccess)",
    ),
    Cause.COLLECTION: (_PYTHON, r"gc\.collect|<built-in function collect>|^Python GC|^gc$"),
    Cause.DATA: (
        _PYTHON,
        # Of Python functions the loader's own only: train() may stand in a data_loader.py as well.
        r"enumerate\(DataLoader\)#|dataloader\.py\(\d+\): __next__|"
        r"^(?!.*\.py\().*(\b(next|load|wait_for|get)_batch\b|\bdata_?load)",
    ),
}
"""What is a cause by its name."""


@dataclass(frozen=True, kw_only=True)
class Idle:
    """The gaps of one device, by cause."""

    trace: Trace
    """The trace they are of."""
    segments: np.ndarray
    """int64 (n, 2): when the device was busy, a union."""
    first: np.ndarray
    """int64 (n,): event that begins each segment."""
    launch: np.ndarray
    """int64 (n,): runtime call that issued it, -1 if the trace has none."""
    threads: np.ndarray
    """int64: threads that issue device work."""
    spans: dict[Cause, np.ndarray]
    """Union of what the launching threads spent in each cause."""
    by_cause: dict[Cause, np.ndarray]
    """int64 (n-1,): ns of each gap by cause; they add up to the gaps."""

    @cached_property
    def gaps(self) -> np.ndarray:
        """int64 (n-1, 2): the gaps between segments."""
        return intervals.gaps(self.segments)

    @property
    def total_ns(self) -> int:
        """All idle time between the first and the last device work."""
        return intervals.measure(self.gaps)

    def ns(self, cause: Cause) -> int:
        """Idle time of one cause."""
        return int(self.by_cause[cause].sum())

    @property
    def opened_by_wait(self) -> np.ndarray:
        """bool (n-1,): gaps that began while the host waited for the device."""
        begin, waits = self.gaps[:, 0], self.spans[Cause.SYNC]
        before = np.searchsorted(waits[:, 0], begin, side="right") - 1
        return (before >= 0) & (begin <= waits[before, 1]) if len(waits) else before >= 0

    def matches(self, cause: Cause) -> np.ndarray:
        """bool per event of the trace: ranges that are ``cause`` by their name."""
        return _named(self.trace, self.threads, cause)

    @property
    def late(self) -> np.ndarray:
        """bool (n-1,): gaps in which the host had not issued the next work in time."""
        return is_late(self.trace, self.launch[1:], self.gaps[:, 0], self.gaps[:, 1])


def explain(trace: Trace) -> Idle:
    """Split the idle time of ``trace`` between its first and last kernel or copy by cause."""
    device = trace.of_kind(Kind.KERNEL, Kind.COPY)
    device = device[trace.dur_ns[device] > 0]
    segments = intervals.union(trace.intervals(device))
    first = device[np.searchsorted(trace.start_ns[device], segments[:, 0])]
    calls = launches(trace, device)
    launch = launches(trace, first)
    threads = np.unique(trace.thread[calls[calls >= 0]])
    spans = _host_spans(trace, threads, device, calls)
    by_cause = _split(trace, segments, launch, spans)
    return Idle(
        trace=trace,
        segments=segments,
        first=first,
        launch=launch,
        threads=threads,
        spans=spans,
        by_cause=by_cause,
    )


def is_late(
    trace: Trace, launch: np.ndarray, idle_from: np.ndarray, start: np.ndarray
) -> np.ndarray:
    """bool: work that starts at ``start`` on a device idle since ``idle_from`` came too late.

    Its call (index, -1 without) began after the device fell idle, or so shortly before the start
    that the time between is the launch itself.
    """
    issued = trace.start_ns[launch]
    return (launch >= 0) & ((issued > idle_from) | (start - issued <= LAUNCH_NS))


def launches(trace: Trace, device: np.ndarray) -> np.ndarray:
    """int64: for each device event the runtime call of its correlation, -1 if there is none."""
    calls = trace.of_kind(Kind.RUNTIME)
    calls = calls[trace.correlation[calls] >= 0]
    if not len(calls):
        return np.full(len(device), -1, dtype=np.int64)
    order = calls[np.argsort(trace.correlation[calls], kind="stable")]
    keys, wanted = trace.correlation[order], trace.correlation[device]
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    found = (
        (wanted >= 0) & (keys[at] == wanted) & (trace.start_ns[order[at]] <= trace.end_ns[device])
    )
    return np.where(found, order[at], -1)


def synchronisations(
    trace: Trace, threads: np.ndarray, device: np.ndarray, calls: np.ndarray
) -> np.ndarray:
    """Calls of ``threads`` in which the host waits for the device, in order of start.

    Named ones, and copies to the host that return only when the copy is done.
    """
    of_threads = np.isin(trace.thread, threads)
    named = (trace.kind == Kind.RUNTIME) & trace.named(_SYNC)[trace.name] & of_threads
    copies = (calls >= 0) & (trace.kind[device] == Kind.COPY)
    copies &= trace.named("DtoH|Device -> (Pageable|Pinned|Host)")[trace.name[device]]
    done, returned = trace.end_ns[device], trace.end_ns[calls]
    named[calls[copies & (returned >= done)]] = True
    return np.flatnonzero(named)


def _named(trace: Trace, threads: np.ndarray, cause: Cause) -> np.ndarray:
    """bool per event: host ranges that are a cause by their name."""
    kinds, pattern = _NAMES[cause]
    mask = np.isin(trace.kind, kinds)
    mask &= trace.named(pattern)[trace.name]
    return mask if cause is Cause.PROFILER else mask & np.isin(trace.thread, threads)


def _host_spans(
    trace: Trace, threads: np.ndarray, device: np.ndarray, calls: np.ndarray
) -> dict[Cause, np.ndarray]:
    """What the launching threads spent in each of ``HOST_CAUSES``."""
    spans = {
        cause: intervals.union(trace.intervals(np.flatnonzero(_named(trace, threads, cause))))
        for cause in _NAMES
    }
    waits = trace.intervals(synchronisations(trace, threads, device, calls))
    spans[Cause.SYNC] = intervals.union(waits)
    silent = _silent_starts(trace, threads)
    spans[Cause.DATA] = intervals.union(np.concatenate([spans[Cause.DATA], silent]))
    return spans


def _silent_starts(trace: Trace, threads: np.ndarray) -> np.ndarray:
    """int64 (n, 2): from the start of a step to its first operator or call, if long.

    A loop that fetches its batch without a range of its own looks like this.
    """
    steps = (trace.kind == Kind.ANNOTATION) & trace.named(r"^ProfilerStep#")[trace.name]
    found = [intervals.EMPTY]
    for thread in np.unique(trace.thread[steps & np.isin(trace.thread, threads)]):
        begin = trace.start_ns[steps & (trace.thread == thread)]
        shown = np.isin(trace.kind, (Kind.CPU_OP, Kind.RUNTIME)) & (trace.thread == thread)
        active = trace.start_ns[shown]
        after = np.searchsorted(active, begin)
        begin, after = begin[after < len(active)], after[after < len(active)]
        spans = np.stack([begin, active[after]], axis=1)
        found.append(spans[spans[:, 1] - spans[:, 0] > SILENCE_NS])
    return np.concatenate(found)


def _split(
    trace: Trace, segments: np.ndarray, launch: np.ndarray, spans: dict[Cause, np.ndarray]
) -> dict[Cause, np.ndarray]:
    """ns of each gap by cause."""
    gaps = intervals.gaps(segments)
    call = launch[1:]
    known = call >= 0
    length = gaps[:, 1] - gaps[:, 0]
    issued = np.where(known, trace.start_ns[call], gaps[:, 0])
    until = np.clip(issued, gaps[:, 0], gaps[:, 1])
    late = is_late(trace, call, gaps[:, 0], gaps[:, 1])
    left = intervals.union(np.stack([gaps[:, 0], until], axis=1))
    parts: dict[Cause, np.ndarray] = {}
    for cause in HOST_CAUSES:
        part = intervals.intersect(left, spans[cause])
        left = intervals.subtract(left, part)
        parts[cause] = intervals.covered(part, gaps[:, 0], gaps[:, 1])
    # What follows the start of a late call is the launch's own latency: host work as well.
    latency = np.where(late, gaps[:, 1] - until, 0)
    parts[Cause.HOST] = intervals.covered(left, gaps[:, 0], gaps[:, 1]) + latency
    parts[Cause.QUEUED] = np.where(known & ~late, length, 0)
    parts[Cause.UNKNOWN] = np.where(known, 0, length)
    return parts
