"""One profile as columns: every event is a row over a few integer arrays, never a Python object.

Names, threads and arguments are stored once and referred to by index, so a trace of four million
events takes a few hundred megabytes. All times are integer nanoseconds.
"""

import enum
import re
from dataclasses import dataclass
from typing import Any

import numpy as np


class Kind(enum.IntEnum):
    """What an event is, whoever made the profile."""

    KERNEL = 0
    COPY = 1
    """Memory copy or memory set on the device."""
    SYNC = 2
    """A wait the profiler shows on a device stream (``cuda_sync``)."""
    CPU_OP = 3
    RUNTIME = 4
    """Call of the CUDA or HIP runtime or driver on the host."""
    PYTHON = 5
    """Python function or module call."""
    ANNOTATION = 6
    """Range named by the program on the host: ``ProfilerStep#N``, ``record_function``, NVTX."""
    GPU_ANNOTATION = 7
    """The same ranges as the profiler projects them on the device."""
    OVERHEAD = 8
    """Work of the profiler itself."""
    OTHER = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """A row of the timeline: a host thread, or a device stream."""

    pid: int | str
    """Process id; of a device row, what the profiler puts there (often the device number)."""
    tid: int | str
    """Thread id, or stream."""
    process_name: str = ""
    """Name of the process, empty if not given."""
    name: str = ""
    """Name of the thread, empty if not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flows:
    """Arrows from a forward operator to its backward (category ``fwdbwd``), one row each."""

    start_ns: np.ndarray
    """int64: time inside the forward operator."""
    start_thread: np.ndarray
    """int32: its row in ``Trace.threads``."""
    end_ns: np.ndarray
    """int64: time inside the backward operator."""
    end_thread: np.ndarray
    """int32: its row in ``Trace.threads``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The profile of one rank. Columns have one row per event, sorted by start.

    Of events that start together the longer comes first, then the one first in the file, so an
    event always comes after the events that enclose it.
    """

    source: str
    """File the trace was read from; ``archive:member`` inside an archive."""
    rank: int | None
    """Global rank, None if neither the file nor its name tells."""
    world_size: int | None
    """Number of ranks of the job, None if not given."""
    device_name: str | None
    """Name of the GPU that ran the kernels, None if not given."""
    device_props: dict[str, Any]
    """The profiler's properties of that GPU; ``numSms`` and ``totalGlobalMem`` among them."""
    group_ranks: dict[str, tuple[int, ...]]
    """Ranks of each process group by its name, as far as the file tells."""
    kind: np.ndarray
    """uint8: ``Kind``."""
    start_ns: np.ndarray
    """int64: start, Unix time where the file gives it."""
    dur_ns: np.ndarray
    """int64: duration, 0 or more."""
    name: np.ndarray
    """int32: index into ``names``."""
    thread: np.ndarray
    """int32: index into ``threads``."""
    device: np.ndarray
    """int32: device number, -1 on the host."""
    stream: np.ndarray
    """int32: stream of the device, -1 on the host or if not given."""
    correlation: np.ndarray
    """int64: number shared by a device event and the runtime call that launched it, -1 without."""
    external: np.ndarray
    """int64: number shared by a device event and the operator that caused it, -1 without."""
    sequence: np.ndarray
    """int64: number shared by a forward operator and its backward, -1 without."""
    forward_thread: np.ndarray
    """int32: of a backward operator the thread that ran its forward; 0 of others, -1 without."""
    detail: np.ndarray
    """int32: index into ``details``, -1 for an event without arguments; see ``args``."""
    names: list[str]
    """Distinct event names."""
    threads: list[Thread]
    """Distinct rows of the timeline."""
    details: list[dict[str, Any]]
    """Distinct sets of the arguments kept, under the names PyTorch uses."""
    flows: Flows
    """Arrows from forward to backward operators."""
    problems: tuple[str, ...]
    """What was wrong with the file and could be read around, one line each."""

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> np.ndarray:
        """int64: end of each event, exclusive."""
        return self.start_ns + self.dur_ns

    def of_kind(self, *kinds: Kind) -> np.ndarray:
        """Indices of the events of these kinds, in order of start."""
        return np.flatnonzero(np.isin(self.kind, np.array(kinds, dtype=np.uint8)))

    def name_of(self, index: int) -> str:
        """Name of one event."""
        return self.names[self.name[index]]

    def args(self, index: int) -> dict[str, Any]:
        """The arguments kept of one event; empty without.

        Kernels: ``grid``, ``block``, ``registers per thread``, ``shared memory``, ``est. achieved
        occupancy %``, and of collectives ``Collective name``, ``In msg nelems``, ``Out msg
        nelems``, ``dtype``, ``Group size``, ``Process Group Name``, ``Process Group Ranks``.
        Copies: ``bytes``. Operators: ``Input Dims``, ``Input type``. Do not change it: equal
        arguments are one object.
        """
        row = self.detail[index]
        return self.details[row] if row >= 0 else {}

    def intervals(self, indices: np.ndarray) -> np.ndarray:
        """Half-open intervals of the events named, int64 of shape (n, 2), sorted by start."""
        starts = self.start_ns[indices]
        return np.stack([starts, starts + self.dur_ns[indices]], axis=1)

    def named(self, pattern: str) -> np.ndarray:
        """bool per entry of ``names``: whether the regular expression occurs, case ignored."""
        search = re.compile(pattern, re.IGNORECASE).search
        return np.fromiter(
            (search(name) is not None for name in self.names), dtype=bool, count=len(self.names)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All traces of one run, in order of rank."""

    title: str
    """What the user named, shortened."""
    traces: tuple[Trace, ...]
    """One per rank; never empty."""
    problems: tuple[str, ...] = ()
    """What concerns the set of files, not one of them."""

    @property
    def num_ranks(self) -> int:
        """Ranks there are traces of."""
        return len(self.traces)
