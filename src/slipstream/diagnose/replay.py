"""What the device would take if the host were not held up: its work replayed.

Busy segments keep their lengths and order. The host issues them at the times of the trace, less the
time of the causes taken out; where it waits for the device, it waits for the replayed one. With
nothing taken out the replay gives the trace back exactly. Collectives keep their length, so what
other ranks would gain is left out.
"""

import numpy as np

from slipstream.diagnose import intervals
from slipstream.diagnose.idle import LAUNCH_NS, Cause, Idle, is_late

_NEVER = np.iinfo(np.int64).min


def saved_ns(idle: Idle, causes: frozenset[Cause]) -> int:
    """ns by which the last device work would end earlier without ``causes``.

    ``Cause.SYNC``: the host goes on instead of waiting. ``Cause.HOST``: issuing costs nothing.
    """
    return int(saved_before(idle, causes)[-1]) if len(idle.segments) else 0


def saved_before(idle: Idle, causes: frozenset[Cause]) -> np.ndarray:
    """int64 (n,): ns by which each segment would begin earlier without ``causes``."""
    if len(idle.segments) < 2:
        return np.zeros(len(idle.segments), dtype=np.int64)
    waits = _waits(idle)
    removed = intervals.subtract(_removed(idle, causes), waits)
    waiting = Cause.SYNC not in causes
    begun = _replay(idle, waits, removed, waiting=waiting)
    return idle.segments[:, 0] - np.array(begun, dtype=np.int64)


def _origin(idle: Idle) -> int:
    """When the host issued the first work; what it did before is no part of the replay."""
    first = int(idle.segments[0, 0])
    return min(first, int(idle.trace.start_ns[idle.launch[0]])) if idle.launch[0] >= 0 else first


def _waits(idle: Idle) -> np.ndarray:
    """int64 (n, 2): synchronisations that join the host to the device.

    A short one while the device works has found what it asked for done, and joins nothing.
    """
    spans = idle.spans[Cause.SYNC]
    long = spans[:, 1] - spans[:, 0] > LAUNCH_NS
    still = intervals.covered(idle.segments, spans[:, 1] - 1, spans[:, 1]) == 0
    return spans[(long | still) & (spans[:, 0] >= _origin(idle))]


def _removed(idle: Idle, causes: frozenset[Cause]) -> np.ndarray:
    """Host time taken out."""
    span = _origin(idle), int(idle.segments[-1, 1])
    if Cause.HOST in causes:
        kept = [idle.spans[cause] for cause in idle.spans if cause not in causes]
        whole = np.array([span], dtype=np.int64)
        return intervals.subtract(whole, intervals.union(np.concatenate([intervals.EMPTY, *kept])))
    parts = [idle.spans[cause] for cause in idle.spans if cause in causes]
    return intervals.clip(intervals.union(np.concatenate([intervals.EMPTY, *parts])), *span)


def _works(idle: Idle) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per segment: when it was issued, its latency from there, and the pause that stays before it.

    int64 ns each; ``_NEVER`` where the trace does not tell when it was issued.
    """
    start = idle.segments[:, 0]
    before = np.concatenate([start[:1], idle.segments[:-1, 1]])
    known = idle.launch >= 0
    issued = np.where(known, idle.trace.start_ns[idle.launch], _NEVER)
    late = is_late(idle.trace, idle.launch, before, start)
    late[0] = known[0]
    latency = np.where(late, start - np.where(known, issued, start), LAUNCH_NS)
    return issued, latency, np.where(late, 0, start - before)


def _replay(idle: Idle, waits: np.ndarray, removed: np.ndarray, *, waiting: bool) -> list[int]:
    """When each segment begins."""
    starts = idle.segments[:, 0]
    issued, latency, pause = _works(idle)
    length = idle.segments[:, 1] - starts
    awaited = np.maximum(np.searchsorted(starts, waits[:, 1], side="left") - 1, 0)
    done = np.minimum(waits[:, 1], idle.segments[awaited, 1])
    tail = waits[:, 1] - np.maximum(waits[:, 0], done)
    gone_at_wait = _before(removed, waits[:, 0])
    columns = (waits[:, 0], waits[:, 1], gone_at_wait, awaited, done - starts[awaited], tail)
    calls = list(zip(*(column.tolist() for column in columns), strict=True))
    works = (issued, latency, pause, length, _before(removed, issued))
    begun: list[int] = []
    clock, ahead, upcoming = int(starts[0]), 0, 0
    for when, delay, gap, duration, gone in zip(*(w.tolist() for w in works), strict=True):
        while upcoming < len(calls) and calls[upcoming][0] < when:
            begin, end, gone_then, segment, offset, rest = calls[upcoming]
            arrival = begin - gone_then - ahead
            released = arrival
            if waiting and segment < len(begun):
                released = max(arrival, begun[segment] + offset) + rest
            elif waiting:
                released = arrival + end - begin
            ahead = end - gone_then - released
            upcoming += 1
        begin = clock + gap if when == _NEVER else max(when - gone - ahead + delay, clock + gap)
        begun.append(begin)
        clock = begin + duration
    return begun


def _before(removed: np.ndarray, at_ns: np.ndarray) -> np.ndarray:
    """int64: how much host time is taken out before each time."""
    if not len(removed):
        return np.zeros_like(at_ns)
    begin = np.full_like(at_ns, removed[0, 0])
    return intervals.covered(removed, begin, np.maximum(at_ns, begin))
