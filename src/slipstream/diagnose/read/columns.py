"""Collects events as columns and sorts them into a ``Trace``.

An event that cannot be right (no name, no time, negative or absurd duration) is left out and
counted; the counts become the trace's ``problems``.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from slipstream.diagnose.read.limits import Limits
from slipstream.diagnose.trace import Flows, Kind, Thread, Trace
from slipstream.errors import DataError

MAX_DISTANCE_NS = 7 * 24 * 3600 * 10**9
_INT64_MAX = 2**63 - 1
_OBJECTS_PER_TEXT = 5
"""Memory of parsed arguments over that of their JSON."""
_DTYPES = {
    "kind": np.uint8,
    "name": np.int32,
    "thread": np.int32,
    "device": np.int32,
    "stream": np.int32,
    "correlation": np.int64,
    "external": np.int64,
    "sequence": np.int64,
    "forward_thread": np.int32,
    "detail": np.int32,
}


class Columns:
    """Columns of one trace while it is read."""

    def __init__(self, source: str, limits: Limits) -> None:
        self.source = source
        self.bad: Counter[str] = Counter()
        """What was left out, by reason."""
        self.problems: list[str] = []
        self._process_names: dict[int | str, str] = {}
        self._thread_names: dict[tuple[int | str, int | str], str] = {}
        self._limits = limits
        self._names: dict[str, int] = {}
        self._threads: dict[tuple[int | str, int | str], int] = {}
        self._details: dict[bytes, int] = {}
        self._text_bytes = 0
        self._num = self._num_arrow_ends = 0
        self._parts: list[dict[str, np.ndarray]] = []
        self._flows: dict[str, list[np.ndarray]] = {"s": [], "f": []}

    @property
    def num_events(self) -> int:
        """Events appended so far."""
        return self._num

    def name_index(self, name: str) -> int:
        """Index of a name, new or known."""
        index = self._names.get(name)
        if index is None:
            self._count_text(len(name))
            index = self._names[name] = len(self._names)
        return index

    def thread_index(self, pid: Any, tid: Any) -> int:
        """Index of a thread, new or known, by process and thread as the file gives them."""
        try:
            return self._threads[pid, tid]
        except (KeyError, TypeError):
            key = label(pid), label(tid)
        index = self._threads.get(key)
        if index is None:
            index = self._threads[key] = len(self._threads)
            self._check_rows(len(self._threads), "threads")
        return index

    def detail_index(self, arguments: dict[str, Any]) -> int:
        """Index of a set of arguments, new or known; -1 if empty."""
        if not arguments:
            return -1
        key = orjson.dumps(arguments)
        index = self._details.get(key)
        if index is None:
            self._count_text(_OBJECTS_PER_TEXT * len(key))
            index = self._details[key] = len(self._details)
        return index

    def add(self, start_ns: np.ndarray, dur_ns: np.ndarray, fields: dict[str, Any]) -> None:
        """Append events: times, and per field one value for all or a sequence of what was read.

        Fields not given are -1; numbers read that are no integers, negative or too large are, too.
        """
        num = len(start_ns)
        self._num += num
        self._check_events()
        keep = (dur_ns >= 0) & (dur_ns <= MAX_DISTANCE_NS)
        self.bad["a negative or absurd duration"] += int((~keep).sum())
        part = {"start_ns": start_ns, "dur_ns": dur_ns}
        for field, dtype in _DTYPES.items():
            values = fields.get(field, -1)
            part[field] = (
                np.full(num, values, dtype) if type(values) is int else _ints(values, dtype)
            )
        self._parts.append({field: values[keep] for field, values in part.items()})

    def add_flows(self, phase: str, rows: list[tuple[int, int]], at_ns: np.ndarray) -> None:
        """Append starts (``s``) or ends (``f``) of arrows: rows of arrow id and thread."""
        table = np.concatenate([np.array(rows, dtype=np.int64), at_ns[:, None]], axis=1)
        self._flows[phase].append(table)
        self._num_arrow_ends += len(table)
        self._check_events()

    def add_process_name(self, pid: Any, name: Any) -> None:
        """Name a process."""
        self._count_text(200)
        self._process_names[label(pid)] = str(name)[:200]

    def add_thread_name(self, pid: Any, tid: Any, name: Any) -> None:
        """Name a thread."""
        self._count_text(200)
        self._thread_names[label(pid), label(tid)] = str(name)[:200]

    def finish(
        self,
        *,
        rank: int | None,
        world_size: int | None,
        properties: list[dict[str, Any]],
        group_ranks: dict[str, tuple[int, ...]],
        base_ns: int,
    ) -> Trace:
        """Sort the events and build the trace; ``base_ns`` is added to every time."""
        columns = self._sorted()
        start_ns = columns.pop("start_ns")
        device = _device_of(columns, properties)
        return Trace(
            source=self.source,
            rank=rank,
            world_size=world_size,
            device_name=str(device.get("name") or "") or None,
            device_props=device,
            group_ranks=group_ranks,
            start_ns=start_ns + base_ns,
            names=list(self._names),
            threads=[
                Thread(
                    pid=pid,
                    tid=tid,
                    process_name=self._process_names.get(pid, ""),
                    name=self._thread_names.get((pid, tid), ""),
                )
                for pid, tid in self._threads
            ],
            details=[orjson.loads(key) for key in self._details],
            flows=self._paired_flows(base_ns),
            problems=(*self.problems, *self._bad_lines()),
            **columns,
        )

    def _sorted(self) -> dict[str, np.ndarray]:
        if not self._parts:
            return {
                field: np.empty(0, dtype=dtype)
                for field, dtype in (_DTYPES | {"start_ns": np.int64, "dur_ns": np.int64}).items()
            }
        starts = np.concatenate([part["start_ns"] for part in self._parts])
        durations = np.concatenate([part["dur_ns"] for part in self._parts])
        middle = int(np.partition(starts, len(starts) // 2)[len(starts) // 2])
        near = np.abs(starts - middle) <= MAX_DISTANCE_NS
        self.bad["a time more than a week from the others"] += int((~near).sum())
        order = np.lexsort((-durations, starts))
        order = order[near[order]]
        columns = {"start_ns": starts[order], "dur_ns": durations[order]}
        for field in _DTYPES:
            whole = np.concatenate([part.pop(field) for part in self._parts])
            columns[field] = whole[order]
        repeated = _repeated(columns)
        self.bad["the same device event twice"] += int(repeated.sum())
        if repeated.any():
            columns = {field: values[~repeated] for field, values in columns.items()}
        self._check_streams(columns)
        return columns

    def _paired_flows(self, base_ns: int) -> Flows:
        start, end = (
            np.concatenate([np.empty((0, 3), dtype=np.int64), *parts])
            for parts in (self._flows["s"], self._flows["f"])
        )
        _, first, second = np.intersect1d(start[:, 0], end[:, 0], return_indices=True)
        start, end = start[first], end[second]
        return Flows(
            start_ns=start[:, 2] + base_ns,
            start_thread=start[:, 1].astype(np.int32),
            end_ns=end[:, 2] + base_ns,
            end_thread=end[:, 1].astype(np.int32),
        )

    def _bad_lines(self) -> list[str]:
        return [
            f"{count} event{'s' if count > 1 else ''} left out: {reason}"
            for reason, count in sorted(self.bad.items())
            if count
        ]

    def _check_events(self) -> None:
        if self._num + self._num_arrow_ends > self._limits.max_events:
            raise DataError(
                f"{self.source}: more than {self._limits.max_events} events, the most that is "
                "read; profile fewer steps, or without Python stacks (with_stack=False)"
            )

    def _check_rows(self, num: int, what: str) -> None:
        if num > self._limits.max_rows:
            raise DataError(
                f"{self.source}: more than {self._limits.max_rows} {what}, the most that is read; "
                "profile fewer steps"
            )

    def _check_streams(self, columns: dict[str, np.ndarray]) -> None:
        on_device = np.isin(columns["kind"], np.array([Kind.KERNEL, Kind.COPY], dtype=np.uint8))
        streams = columns["device"][on_device].astype(np.int64) << 32
        streams += columns["stream"][on_device]
        self._check_rows(len(np.unique(streams)), "streams")

    def _count_text(self, size: int) -> None:
        self._text_bytes += size + 100
        if self._text_bytes > self._limits.max_name_bytes:
            raise DataError(
                f"{self.source}: names and arguments take more than "
                f"{self._limits.max_name_bytes} bytes, the most that is read; profile fewer "
                "steps, or without shapes (record_shapes=False)"
            )


def _ints(values: Sequence[Any], dtype: type[np.integer]) -> np.ndarray:
    """The values as ``small_int`` reads them."""
    limit = np.iinfo(dtype).max
    if set(map(type, values)) <= {int}:
        try:
            whole = np.array(values, dtype=np.int64)
            return np.where((whole >= 0) & (whole <= limit), whole, -1).astype(dtype)
        except OverflowError:
            pass
    return np.array([small_int(value, limit) for value in values], dtype=dtype)


def label(value: Any) -> int | str:
    """A process or thread id as the file gives it."""
    return value if type(value) is int else str(value)[:200]


def small_int(value: Any, limit: int = _INT64_MAX) -> int:
    """An integer argument, also when written as text; -1 for anything else."""
    if type(value) is int:
        return value if 0 <= value <= limit else -1
    text = isinstance(value, str) and len(value) < 20 and value.isascii() and value.isdecimal()
    if not text and not (isinstance(value, float) and value.is_integer()):
        return -1
    value = int(value)
    return value if 0 <= value <= limit else -1


def _repeated(columns: dict[str, np.ndarray]) -> np.ndarray:
    """bool per sorted event: a launched device event equal to the one before it in every column."""
    fields = ("start_ns", "dur_ns", "name", "device", "stream", "correlation")
    on_device = (columns["kind"] == Kind.KERNEL) | (columns["kind"] == Kind.COPY)
    same = on_device & (columns["correlation"] >= 0) & (columns["dur_ns"] > 0)
    candidates = np.flatnonzero(same)
    repeated = np.zeros(len(same), dtype=bool)
    if len(candidates):
        keys = [columns[field][candidates] for field in fields]
        order = np.lexsort(keys[::-1])
        equal = np.ones(len(order) - 1, dtype=bool)
        for key in keys:
            equal &= key[order][1:] == key[order][:-1]
        repeated[candidates[order[1:][equal]]] = True
    return repeated


def _device_of(columns: dict[str, np.ndarray], properties: list[dict[str, Any]]) -> dict[str, Any]:
    """Properties of the device that ran most kernels; empty if not told."""
    devices = columns["device"][columns["kind"] == Kind.KERNEL]
    devices = devices[devices >= 0]
    if len(devices):
        used = int(np.bincount(devices[devices < 65536]).argmax()) if (devices < 65536).any() else 0
        return next((one for one in properties if one.get("id") == used), {})
    return properties[0] if len(properties) == 1 else {}
