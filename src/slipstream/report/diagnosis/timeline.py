"""The timeline picture as data: lanes of boxes over one window of time, for ``timeline.js``.

Per rank a strip that says at each moment which part of the split it belongs to, a lane per device
stream, and a lane per host thread that launches work. Boxes too short to see in a window of that
many are drawn together, so that a page stays small whatever the trace holds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.diagnose import Kind, Trace
from slipstream.diagnose.intervals import clip, subtract, union
from slipstream.report.diagnosis.words import short_name

MAX_BOXES = 12_000
MAX_STREAMS = 6
MAX_HOST_THREADS = 2
COLOURS = (
    "gemm",
    "attention",
    "compute",
    "optimizer",
    "communication",
    "copy",
    "idle",
    "host",
    "sync",
)
_CODE = {name: code for code, name in enumerate(COLOURS)}
_WAITS = r"synchronize|memcpy(?!.*async)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What is shown of one rank."""

    trace: Trace
    """The rank's trace."""
    label: str
    """How the rank is called."""
    start_ns: int
    """First moment shown, in the clock of the trace."""
    end_ns: int
    """Last moment shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Boxes:
    start: np.ndarray
    dur: np.ndarray
    colour: np.ndarray
    text: list[str]


def picture(windows: Sequence[Window], colour_of: Callable[[Trace], np.ndarray]) -> dict[str, Any]:
    """Lanes of boxes in ns from the first moment shown, at most about ``MAX_BOXES`` of them.

    ``colour_of`` gives, per name of a trace, the index into ``COLOURS`` of a kernel called so.
    """
    zeros = origins(windows)
    lanes = []
    for window, origin in zip(windows, zeros, strict=True):
        lanes += _rank_lanes(window, origin, colour_of(window.trace))
    budget = MAX_BOXES // max(1, len(lanes))
    names: dict[str, int] = {}
    drawn = [{**lane, "boxes": _packed(_merge(lane["boxes"], budget), names)} for lane in lanes]
    return {
        "span_ns": max(1, max(w.end_ns - o for w, o in zip(windows, zeros, strict=True))),
        "colours": list(COLOURS),
        "names": list(names),
        "lanes": drawn,
    }


def origins(windows: Sequence[Window]) -> list[int]:
    """The moment drawn at 0, of each rank, in the clock of its trace.

    Ranks whose windows do not overlap have no common clock; each then starts at 0.
    """
    common = max(w.start_ns for w in windows) < min(w.end_ns for w in windows)
    zero = min(w.start_ns for w in windows)
    return [zero if common else w.start_ns for w in windows]


def _rank_lanes(window: Window, origin: int, colours: np.ndarray) -> list[dict[str, Any]]:
    trace = window.trace
    device = _inside(window, trace.of_kind(Kind.KERNEL, Kind.COPY))
    tint = np.where(trace.kind[device] == Kind.COPY, _CODE["copy"], colours[trace.name[device]])
    where = f"{window.label}, " if window.label else ""
    lanes = [
        {
            "title": window.label,
            "label": "split",
            "where": f"{where}split",
            "strip": True,
            "boxes": _split_strip(window, origin, device, tint),
        }
    ]
    for label, chosen in _streams(trace, device):
        boxes = _events(window, origin, device[chosen], tint[chosen])
        lanes.append(_lane(label, where, boxes))
    for label, indices in _host_threads(window):
        waits = trace.named(_WAITS)[trace.name[indices]] & (trace.kind[indices] == Kind.RUNTIME)
        tint = np.where(waits, _CODE["sync"], _CODE["host"])
        lanes.append(_lane(label, where, _events(window, origin, indices, tint)))
    return lanes


def _lane(label: str, where: str, boxes: _Boxes) -> dict[str, Any]:
    return {"title": "", "label": label, "where": where + label, "strip": False, "boxes": boxes}


def _inside(window: Window, indices: np.ndarray) -> np.ndarray:
    trace = window.trace
    starts = trace.start_ns[indices]
    ends = starts + trace.dur_ns[indices]
    return indices[(ends > window.start_ns) & (starts < window.end_ns)]


def _split_strip(window: Window, origin: int, device: np.ndarray, tint: np.ndarray) -> _Boxes:
    """The four parts of the split as boxes: what each moment counts as."""
    spans = window.trace.intervals(device)
    copying = window.trace.kind[device] == Kind.COPY
    talking = (tint == _CODE["communication"]) & ~copying
    compute = union(spans[~talking & ~copying])
    communication = subtract(union(spans[talking]), compute)
    copies = subtract(subtract(union(spans[copying]), compute), communication)
    whole = np.array([[window.start_ns, window.end_ns]], dtype=np.int64)
    parts = {
        "compute": ("compute", compute),
        "exposed communication": ("communication", communication),
        "exposed copies": ("copy", copies),
        "idle": ("idle", subtract(whole, union(spans))),
    }
    text, colour, pieces = [], [], []
    for name, (code, part) in parts.items():
        part = clip(part, window.start_ns, window.end_ns)
        pieces.append(part)
        colour += [_CODE[code]] * len(part)
        text += [name] * len(part)
    spans = np.concatenate(pieces)
    order = np.argsort(spans[:, 0], kind="stable")
    return _Boxes(
        start=spans[order, 0] - origin,
        dur=(spans[:, 1] - spans[:, 0])[order],
        colour=np.array(colour, dtype=np.int64)[order],
        text=[text[i] for i in order],
    )


def _streams(trace: Trace, device: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Label and positions in ``device`` of each stream, those with most work; the rest as one."""
    keys = np.stack([trace.device[device], trace.stream[device]], axis=1).astype(np.int64)
    found, which = np.unique(keys, axis=0, return_inverse=True)
    which = which.ravel()
    work = np.bincount(which, weights=trace.dur_ns[device], minlength=len(found))
    kept = sorted(np.argsort(-work, kind="stable")[:MAX_STREAMS].tolist())
    many = len({int(row[0]) for row in found}) > 1
    lanes = []
    for row in kept:
        number, stream = found[row].tolist()
        label = f"stream {stream}" if stream >= 0 else "device"
        lanes.append((f"GPU {number} {label}" if many else label, np.flatnonzero(which == row)))
    rest = ~np.isin(which, kept)
    if rest.any():
        lanes.append((f"{len(found) - len(kept)} other streams", np.flatnonzero(rest)))
    return lanes


def _host_threads(window: Window) -> list[tuple[str, np.ndarray]]:
    """Label and events of the threads that call the GPU's runtime most: outermost, then waits."""
    trace = window.trace
    calls = _inside(window, trace.of_kind(Kind.RUNTIME))
    if not len(calls):
        return []
    counts = np.bincount(trace.thread[calls], minlength=len(trace.threads))
    busiest = np.argsort(-counts, kind="stable")[:MAX_HOST_THREADS]
    events = _inside(window, trace.of_kind(Kind.CPU_OP, Kind.RUNTIME, Kind.ANNOTATION))
    step = trace.named(r"^ProfilerStep")[trace.name[events]]
    whole = trace.dur_ns[events] >= window.end_ns - window.start_ns
    events = events[~step & ~whole]
    waiting = trace.named(_WAITS)
    lanes = []
    for thread in busiest[counts[busiest] > 0].tolist():
        own = events[trace.thread[events] == thread]
        ends = np.maximum.accumulate(trace.end_ns[own]) if len(own) else own
        outer = np.concatenate([[True], trace.start_ns[own][1:] >= ends[:-1]])[: len(own)]
        waits = waiting[trace.name[own]] & (trace.kind[own] == Kind.RUNTIME) & ~outer
        row = trace.threads[thread]
        label = f"host {row.name}" if row.name else f"host thread {row.tid}"
        lanes.append((label[:60], np.concatenate([own[outer], own[waits]])))
    return lanes


def _events(window: Window, origin: int, indices: np.ndarray, colour: np.ndarray) -> _Boxes:
    trace = window.trace
    start = np.maximum(trace.start_ns[indices], window.start_ns)
    end = np.minimum(trace.end_ns[indices], window.end_ns)
    return _Boxes(
        start=start - origin,
        dur=end - start,
        colour=colour.astype(np.int64),
        text=[trace.names[n] for n in trace.name[indices].tolist()],
    )


def _merge(boxes: _Boxes, budget: int) -> _Boxes:
    """Join short neighbours that lie in one cell of time; cells as fine as ``budget`` allows."""
    if len(boxes.start) <= budget:
        return boxes
    order = np.argsort(boxes.start, kind="stable")
    start, dur, colour = boxes.start[order], boxes.dur[order], boxes.colour[order]
    end = start + dur
    cell_ns = max(1, int(end.max() - start[0]) // budget)
    while True:
        cell, short = start // cell_ns, dur < cell_ns
        joined = (cell[1:] == cell[:-1]) & short[1:] & short[:-1]
        run = np.concatenate([[0], np.cumsum(~joined)])
        if run[-1] < budget:
            break
        cell_ns *= 2
    num = int(run[-1]) + 1
    first = np.searchsorted(run, np.arange(num))
    work = np.zeros((num, len(COLOURS)), dtype=np.int64)
    np.add.at(work, (run, colour), dur + 1)
    last = np.zeros(num, dtype=np.int64)
    np.maximum.at(last, run, end)
    size = np.bincount(run, minlength=num)
    text = [
        boxes.text[order[f]] if n == 1 else f"{n} short ones drawn together"
        for f, n in zip(first.tolist(), size.tolist(), strict=True)
    ]
    return _Boxes(start=start[first], dur=last - start[first], colour=work.argmax(1), text=text)


def _packed(boxes: _Boxes, names: dict[str, int]) -> list[int]:
    """Start, duration, colour, name of each box in one list."""
    indices = [names.setdefault(short_name(text), len(names)) for text in boxes.text]
    columns = [boxes.start, boxes.dur, boxes.colour, np.array(indices, dtype=np.int64)]
    return np.stack(columns, axis=1).astype(np.int64).ravel().tolist()
