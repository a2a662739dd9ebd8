"""Chrome traces as torch.profiler writes them, for any vendor's device."""

import gc
import io
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

from slipstream.diagnose.read.chunks import EventReader, NotATraceError
from slipstream.diagnose.read.columns import Columns, small_int
from slipstream.diagnose.read.limits import Limits
from slipstream.diagnose.read.times import MAX_NS, InexactTimesError, ns_of, whole_ns
from slipstream.diagnose.trace import Kind, Trace

_KINDS = {
    "kernel": Kind.KERNEL,
    "concurrent_kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.COPY,
    "gpu_memset": Kind.COPY,
    "memcpy": Kind.COPY,
    "memset": Kind.COPY,
    "cuda_sync": Kind.SYNC,
    "cpu_op": Kind.CPU_OP,
    "operator": Kind.CPU_OP,
    "cuda_runtime": Kind.RUNTIME,
    "cuda_driver": Kind.RUNTIME,
    "hip_runtime": Kind.RUNTIME,
    "hip_driver": Kind.RUNTIME,
    "runtime": Kind.RUNTIME,
    "xpu_runtime": Kind.RUNTIME,
    "xpu_driver": Kind.RUNTIME,
    "privateuse1_runtime": Kind.RUNTIME,
    "privateuse1_driver": Kind.RUNTIME,
    "python_function": Kind.PYTHON,
    "user_annotation": Kind.ANNOTATION,
    "gpu_user_annotation": Kind.GPU_ANNOTATION,
    "overhead": Kind.OVERHEAD,
}
_ON_DEVICE = frozenset({Kind.KERNEL, Kind.COPY, Kind.SYNC, Kind.GPU_ANNOTATION})
_SHAPES = frozenset({"Input Dims", "Input type"})
_COLLECTIVE = frozenset(
    {
        "Collective name",
        "In msg nelems",
        "Out msg nelems",
        "dtype",
        "Group size",
        "Process Group Name",
        "Process Group Ranks",
        "In split size",
    }
)
_KERNEL = _COLLECTIVE | {
    "grid",
    "block",
    "registers per thread",
    "shared memory",
    "est. achieved occupancy %",
}
_KEPT = {
    Kind.KERNEL: _KERNEL,
    Kind.COPY: frozenset({"bytes"}),
    Kind.SYNC: frozenset({"cuda_sync_kind", "wait_on_stream"}),
    Kind.CPU_OP: _SHAPES | _COLLECTIVE,
    Kind.ANNOTATION: _SHAPES | _COLLECTIVE,
}
_FLOW_CATEGORIES = frozenset({"fwdbwd", "forward_backward", "fwd_bwd"})
_FIELDS = (
    "kind",
    "name",
    "thread",
    "device",
    "stream",
    "correlation",
    "external",
    "sequence",
    "forward_thread",
    "detail",
)
_INT32_MAX = 2**31 - 1


def read_chrome(stream: io.BufferedReader, source: str, limits: Limits) -> Trace:
    """Read one trace from its decompressed text. The rank is what the file says, or None."""
    reader = EventReader(stream, source, limits)
    columns = Columns(source, limits)
    intake = _Intake(columns)
    with _without_collection():
        exact = False
        for batch in reader.batches():
            events, bad = batch.events(exact=exact)
            try:
                intake.take(events, exact=exact)
            except InexactTimesError:
                exact = True
                events, bad = batch.events(exact=True)
                intake.take(events, exact=True)
            columns.bad["not readable as JSON"] += bad
    if reader.is_list and not columns.num_events:
        raise NotATraceError(
            f"{source}: a JSON list without a single complete event; a trace is what "
            "torch.profiler's export_chrome_trace writes"
        )
    columns.problems += reader.problems
    return _finish(columns, reader.metadata)


@contextmanager
def _without_collection() -> Generator[None]:
    """Pause the cycle collector: parsed events hold no cycles, and searching them for some takes
    half the time of reading.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _finish(columns: Columns, metadata: dict[str, Any]) -> Trace:
    distributed = metadata.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    rank = small_int(distributed.get("rank"), _INT32_MAX)
    world_size = small_int(distributed.get("world_size"), _INT32_MAX)
    base_ns = small_int(metadata.get("baseTimeNanoseconds"), MAX_NS)
    properties = metadata.get("deviceProperties")
    if world_size == 0 or (rank >= world_size > 0):
        columns.problems.append(f"rank {rank} of a world of {world_size} is impossible; ignored")
        rank = world_size = -1
    return columns.finish(
        rank=rank if rank >= 0 else None,
        world_size=world_size if world_size > 0 else None,
        properties=[p for p in properties if isinstance(p, dict)]
        if isinstance(properties, list)
        else [],
        group_ranks=_group_ranks(distributed.get("pg_config")),
        base_ns=max(base_ns, 0),
    )


def _group_ranks(config: Any) -> dict[str, tuple[int, ...]]:
    """Ranks by process group, from ``distributedInfo.pg_config``."""
    groups = {}
    for group in config if isinstance(config, list) else []:
        if isinstance(group, dict) and isinstance(group.get("ranks"), list):
            ranks = tuple(small_int(rank) for rank in group["ranks"])
            if ranks and min(ranks) >= 0:
                groups[str(group.get("pg_name"))] = ranks
    return groups


class _Intake:
    """Turns parsed events into columns; a batch is taken whole or not at all."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._kinds: dict[Any, Kind] = {}

    def take(self, events: list[Any], *, exact: bool) -> None:
        """Take one batch. InexactTimesError if its times need the text and are not (``exact``)."""
        calls, rest, bad = _Rows(exact), _Rows(exact), 0
        flows = {"s": _Rows(exact), "f": _Rows(exact)}
        for event in events:
            try:
                phase = event["ph"]
                if phase == "X":
                    kind = self._kind(event.get("cat"))
                    if kind is Kind.PYTHON:
                        calls.append(event, self._call(event))
                    else:
                        rest.append(event, self._row(event, kind))
                elif phase in flows:
                    if event.get("cat") in _FLOW_CATEGORIES:
                        flows[phase].append(event, self._flow(event))
                elif phase == "M":
                    self._metadata(event)
            except (AttributeError, KeyError, TypeError, ValueError):
                bad += 1
        for rows in (calls, rest, *flows.values()):
            rows.read_times()
        self._columns.bad["not an event"] += bad
        self._columns.bad["a time or duration that is no number"] += calls.bad + rest.bad
        if calls.rows:
            fields = dict(zip(("name", "thread"), zip(*calls.rows, strict=True), strict=True))
            self._columns.add(calls.start_ns, calls.dur_ns, fields | {"kind": int(Kind.PYTHON)})
        if rest.rows:
            fields = dict(zip(_FIELDS, zip(*rest.rows, strict=True), strict=True))
            self._columns.add(rest.start_ns, rest.dur_ns, fields)
        for phase, rows in flows.items():
            if rows.rows:
                self._columns.add_flows(phase, rows.rows, rows.start_ns)

    def _call(self, event: dict[str, Any]) -> tuple[int, int]:
        """A Python call, of which nothing but name, thread and times is kept."""
        columns = self._columns
        return columns.name_index(_name(event)), columns.thread_index(*_thread(event))

    def _row(self, event: dict[str, Any], kind: Kind) -> tuple[Any, ...]:
        args = event.get("args")
        if type(args) is not dict:
            args = {}
        columns = self._columns
        pid, tid = _thread(event)
        device, stream = -1, -1
        if kind in _ON_DEVICE:
            device, stream = args.get("device", pid), args.get("stream", tid)
        detail = -1
        if kept := _KEPT.get(kind):
            detail = columns.detail_index({key: args[key] for key in args if key in kept})
        return (
            int(kind),
            columns.name_index(_name(event)),
            columns.thread_index(pid, tid),
            device,
            stream,
            args.get("correlation", -1),
            args.get("External id", -1),
            args.get("Sequence number", -1),
            args.get("Fwd thread id", -1),
            detail,
        )

    def _kind(self, category: Any) -> Kind:
        kind = self._kinds.get(category)
        if kind is None:
            kind = _KINDS.get(str(category).lower(), Kind.OTHER)
            if len(self._kinds) < 1000:
                self._kinds[category] = kind
        return kind

    def _flow(self, event: dict[str, Any]) -> tuple[int, int]:
        return small_int(event["id"]), self._columns.thread_index(*_thread(event))

    def _metadata(self, event: dict[str, Any]) -> None:
        if event["name"] == "process_name":
            self._columns.add_process_name(event["pid"], event["args"]["name"])
        elif event["name"] == "thread_name":
            self._columns.add_thread_name(event["pid"], event["tid"], event["args"]["name"])


class _Rows:
    """Events of a batch and their times."""

    def __init__(self, exact: bool) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.bad = 0
        self._starts: list[Any] = []
        self._durations: list[Any] = []
        self._exact = exact

    def append(self, event: dict[str, Any], row: tuple[Any, ...]) -> None:
        """Append an event and what is kept of it."""
        start = event["ts"]
        self._durations.append(event.get("dur", 0))
        self._starts.append(start)
        self.rows.append(row)

    def read_times(self) -> None:
        """Make ``start_ns`` and ``dur_ns``; rows without are taken out and counted as ``bad``."""
        start_ns, good_start = _times(self._starts, self._exact)
        dur_ns, good_duration = _times(self._durations, self._exact)
        good = good_start & good_duration
        self.start_ns, self.dur_ns = start_ns[good], dur_ns[good]
        self.bad = int((~good).sum())
        if self.bad:
            pairs = zip(self.rows, good.tolist(), strict=True)
            self.rows = [row for row, kept in pairs if kept]


def _name(event: dict[str, Any]) -> str:
    name = event["name"]
    if type(name) is not str:
        raise TypeError("the name is no string")
    return name


def _thread(event: dict[str, Any]) -> tuple[Any, Any]:
    return event.get("pid", ""), event.get("tid", "")


def _times(values: list[Any], exact: bool) -> tuple[np.ndarray, np.ndarray]:
    """int64 nanoseconds, and bool: whether each value is a time at all."""
    try:
        return whole_ns(values, texts=exact), np.ones(len(values), dtype=bool)
    except (ValueError, OverflowError):
        pass
    times = np.zeros(len(values), dtype=np.int64)
    good = np.zeros(len(values), dtype=bool)
    for row, value in enumerate(values):
        try:
            times[row] = ns_of(value, texts=exact)
            good[row] = True
        except (ValueError, OverflowError):
            continue
    return times, good
