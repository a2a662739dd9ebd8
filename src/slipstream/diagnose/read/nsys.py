"""Nsight Systems profiles, as ``nsys export --type sqlite`` writes them: one trace per process.

Tables and columns vary over versions, so each query names only what the file has. NVTX ranges take
the place of annotations; there are no operators and no shapes.
"""

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from slipstream.diagnose.read.chunks import NotATraceError
from slipstream.diagnose.read.columns import Columns, small_int
from slipstream.diagnose.read.limits import Limits
from slipstream.diagnose.read.times import MAX_NS
from slipstream.diagnose.trace import Kind, Trace
from slipstream.errors import DataError

_ROWS = 100_000
_VERSION = re.compile(r"_v\d+$")
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """One table of events."""

    table: str
    kind: Kind
    process: str
    """Column that holds process (and thread), as ``pid << 24 | tid``."""
    name: tuple[str, ...]
    """Columns the name is made of; the first that exists is used."""
    details: tuple[str, ...] = ()
    """Columns that ``_details`` turns into arguments."""


_GRID = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread")
_SHARED = ("staticSharedMemory", "dynamicSharedMemory")
_SOURCES = (
    _Source(
        table="CUPTI_ACTIVITY_KIND_KERNEL",
        kind=Kind.KERNEL,
        process="globalPid",
        name=("demangledName", "shortName", "mangledName"),
        details=_GRID + _SHARED,
    ),
    _Source(
        table="CUPTI_ACTIVITY_KIND_MEMCPY",
        kind=Kind.COPY,
        process="globalPid",
        name=("copyKind",),
        details=("bytes",),
    ),
    _Source(
        table="CUPTI_ACTIVITY_KIND_MEMSET",
        kind=Kind.COPY,
        process="globalPid",
        name=(),
        details=("bytes",),
    ),
    _Source(
        table="CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
        kind=Kind.SYNC,
        process="globalPid",
        name=("syncType",),
    ),
    _Source(
        table="CUPTI_ACTIVITY_KIND_RUNTIME",
        kind=Kind.RUNTIME,
        process="globalTid",
        name=("nameId",),
    ),
    _Source(
        table="CUPTI_ACTIVITY_KIND_DRIVER",
        kind=Kind.RUNTIME,
        process="globalTid",
        name=("nameId",),
    ),
    _Source(
        table="NVTX_EVENTS", kind=Kind.ANNOTATION, process="globalTid", name=("text", "textId")
    ),
)


def read_nsys(path: Path, limits: Limits) -> Iterator[Trace]:
    """One trace per process that ran kernels, or of the whole file if none did."""
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as database:
            database.text_factory = lambda text: text.decode("utf-8", errors="replace")
            database.execute("PRAGMA trusted_schema = OFF")
            yield from _Export(database, path, limits).traces()
    except sqlite3.Error as error:
        raise DataError(f"{path}: damaged SQLite file ({error}); export it again") from error


class _Export:
    """An open export."""

    def __init__(self, database: sqlite3.Connection, path: Path, limits: Limits) -> None:
        self._database, self._path, self._limits = database, path, limits
        self._strings: dict[int, str] = {}
        tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        self._columns = {
            name: {row[1] for row in database.execute(f'PRAGMA table_info("{name}")')}
            for (name,) in tables
            if name.replace("_", "").isalnum()
        }
        self._sources = [one for one in _SOURCES if "start" in self._columns.get(one.table, ())]
        if not self._sources:
            raise NotATraceError(
                f"{path}: SQLite without events of Nsight Systems; write it with "
                "nsys export --type sqlite"
            )

    def traces(self) -> Iterator[Trace]:
        """The traces of the file, in order of process id."""
        processes = self._processes()
        for process in processes or [None]:
            label = str(self._path)
            if len(processes) > 1 and process is not None:
                label = f"{self._path}:pid {process & 0xFFFFFF}"
            columns = Columns(label, self._limits)
            for source in self._sources:
                self._read(source, columns, process)
            self._read_names(columns)
            yield columns.finish(
                rank=None,
                world_size=None,
                properties=self._devices(),
                group_ranks={},
                base_ns=self._base_ns(),
            )

    def _processes(self) -> list[int]:
        """Processes that ran kernels, as ``globalPid >> 24``; empty if that is not told."""
        table = _SOURCES[0].table
        if "globalPid" not in self._columns.get(table, ()):
            return []
        rows = self._database.execute(f"SELECT DISTINCT globalPid >> 24 FROM {table} ORDER BY 1")
        found = [row[0] for row in rows.fetchmany(self._limits.max_traces + 1)]
        if len(found) > self._limits.max_traces:
            raise DataError(f"{self._path}: more than {self._limits.max_traces} processes")
        return [process for process in found if isinstance(process, int)]

    def _read(self, source: _Source, columns: Columns, process: int | None) -> None:
        """Append the events of one table that belong to a process."""
        present = self._columns[source.table]

        def column(name: str) -> str:
            return f'"{name}"' if name in present else "NULL"

        named = ("start", "end", source.process, "deviceId", "streamId", "correlationId")
        fields = [column(name) for name in named]
        fields.append(f"coalesce({', '.join([*map(column, source.name), 'NULL', 'NULL'])})")
        fields += [column(name) for name in source.details]
        where = ""
        if process is not None and source.process in present:
            where = f" WHERE {source.process} >> 24 = {process}"
        rows = self._database.execute(f"SELECT {', '.join(fields)} FROM {source.table}{where}")
        name_of = _namer(source, self._string)
        while batch := rows.fetchmany(_ROWS):
            self._take(source, batch, columns, name_of)

    def _string(self, value: Any) -> str:
        """A name: text, or an index into the table of strings."""
        if type(value) is not int or not {"id", "value"} <= self._columns.get("StringIds", set()):
            return str(value)
        if value not in self._strings:
            row = self._database.execute(
                "SELECT value FROM StringIds WHERE id = ?", (value,)
            ).fetchone()
            self._strings[value] = str(row[0] if row else value)
        return self._strings[value]

    def _take(
        self,
        source: _Source,
        batch: list[tuple[Any, ...]],
        columns: Columns,
        name_of: Callable[[Any], str],
    ) -> None:
        starts, durations, rows = [], [], []
        on_device = source.kind in (Kind.KERNEL, Kind.COPY, Kind.SYNC)
        for start, end, owner, device, stream, correlation, name, *details in batch:
            if end is None and source.kind is Kind.ANNOTATION:
                continue  # an NVTX mark, not a range
            if type(start) is not int or type(end) is not int or max(abs(start), abs(end)) > MAX_NS:
                columns.bad["a time or duration that is no number"] += 1
                continue
            owner = owner if type(owner) is int else 0
            pid, tid = owner >> 24 & 0xFFFFFF, owner & 0xFFFFFF
            if on_device:
                pid, tid = f"GPU {device}", stream
            else:
                device = stream = -1
            starts.append(start)
            durations.append(end - start)
            thread = columns.thread_index(pid, tid)
            detail = columns.detail_index(_details(source, details))
            rows.append(
                (columns.name_index(name_of(name)), thread, device, stream, correlation, detail)
            )
        if rows:
            names = ("name", "thread", "device", "stream", "correlation", "detail")
            fields = dict(zip(names, zip(*rows, strict=True), strict=True))
            times = np.array(starts, dtype=np.int64), np.array(durations, dtype=np.int64)
            columns.add(*times, fields | {"kind": int(source.kind)})

    def _read_names(self, columns: Columns) -> None:
        """Thread names, where the file has them."""
        if {"nameId", "globalTid"} <= self._columns.get("ThreadNames", set()):
            rows = self._database.execute("SELECT globalTid, nameId FROM ThreadNames LIMIT 100000")
            for owner, name in rows.fetchall():
                if type(owner) is int:
                    pid, tid = owner >> 24 & 0xFFFFFF, owner & 0xFFFFFF
                    columns.add_thread_name(pid, tid, self._string(name))

    def _devices(self) -> list[dict[str, Any]]:
        """Properties of the GPUs, under the profiler's names of PyTorch."""
        present = self._columns.get("TARGET_INFO_GPU", set())
        if not {"id", "name"} <= present:
            return []
        wanted = {
            "numSms": "smCount",
            "totalGlobalMem": "totalMemory",
            "computeMajor": "computeMajor",
        }
        known = {key: name for key, name in wanted.items() if name in present}
        fields = ", ".join(["id", "name", *known.values()])
        rows = self._database.execute(f"SELECT {fields} FROM TARGET_INFO_GPU LIMIT 1000")
        return [dict(zip(("id", "name", *known), row, strict=True)) for row in rows]

    def _base_ns(self) -> int:
        """Unix time at which the file's clock is 0."""
        if "utcEpochNs" not in self._columns.get("TARGET_INFO_SESSION_START_TIME", ()):
            return 0
        row = self._database.execute(
            "SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME LIMIT 1"
        ).fetchone()
        return max(small_int(row[0], MAX_NS), 0) if row else 0


def _namer(source: _Source, string: Callable[[Any], str]) -> Callable[[Any], str]:
    """How a table's name column becomes the name PyTorch's profiler would give."""
    if source.table.endswith("MEMCPY"):
        return lambda kind: f"Memcpy {_COPY_KINDS.get(kind, 'other')}"
    if source.table.endswith("MEMSET"):
        return lambda _: "Memset (Device)"
    if source.kind is Kind.SYNC:
        return lambda kind: {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync"}.get(
            kind, "Context Sync"
        )
    if source.kind is Kind.RUNTIME:
        return lambda name: _VERSION.sub("", string(name))
    return string


def _details(source: _Source, values: list[Any]) -> dict[str, Any]:
    if not values:
        return {}
    whole = [max(small_int(value), 0) for value in values]
    if source.kind is Kind.COPY:
        return {"bytes": whole[0]}
    return {
        "grid": whole[0:3],
        "block": whole[3:6],
        "registers per thread": whole[6],
        "shared memory": whole[7] + whole[8],
    }
