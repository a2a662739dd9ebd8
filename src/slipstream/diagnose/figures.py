"""The figures of a trace: an exact additive split, whole and by step, stream, class and phase.

Kernels and copies cover the device's time; span = compute + exposed communication + exposed copies
+ idle, to the nanosecond. Communication is hidden while any other kernel runs; copies hide nothing.
"""

from dataclasses import dataclass, field

import numpy as np

from slipstream.diagnose.classify import KernelClass, KernelInfo
from slipstream.diagnose.collectives import Communication
from slipstream.diagnose.ranks import RankMatch
from slipstream.diagnose.trace import Job, Kind, Trace

SHORT_KERNEL_NS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Exact split of a stretch of device time, ns. The first five add up:
    span = compute + exposed communication + exposed copies + idle.
    """

    span_ns: int
    """First start to last end of kernels and copies."""
    compute_ns: int
    """Some kernel that is not communication runs."""
    exposed_communication_ns: int
    """Communication runs and no other kernel."""
    exposed_copies_ns: int
    """A copy runs and no kernel."""
    idle_ns: int
    """Nothing runs."""
    communication_ns: int
    """Communication runs, alone or not."""
    copies_ns: int
    """A copy runs, alone or not."""
    kernel_span_ns: int
    """First start to last end of kernels alone."""
    num_kernels: int
    """Kernels, communication among them."""
    num_communication_kernels: int
    """Communication kernels."""
    num_copies: int
    """Memory copies and sets."""

    @property
    def busy_ns(self) -> int:
        """Some kernel runs."""
        return self.compute_ns + self.exposed_communication_ns

    @property
    def hidden_communication_ns(self) -> int:
        """Communication runs beside another kernel."""
        return self.communication_ns - self.exposed_communication_ns

    @property
    def busy_pct(self) -> float | None:
        """Busy share of the kernels' span; None without kernels."""
        return _percent(self.busy_ns, self.kernel_span_ns)

    @property
    def busy_with_copies_pct(self) -> float | None:
        """Share of the span in which a kernel or a copy runs; None for an empty span."""
        return _percent(self.span_ns - self.idle_ns, self.span_ns)

    @property
    def overlap_pct(self) -> float | None:
        """Hidden share of the communication; None without communication."""
        return _percent(self.hidden_communication_ns, self.communication_ns)

    def pct(self, part_ns: int) -> float:
        """A part as a percentage of the span; 0 of an empty span."""
        return _percent(part_ns, self.span_ns) or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelStats:
    """Durations of kernels and the gaps between them, over all streams."""

    num: int
    """Kernels."""
    short_pct: float
    """Share, by count, shorter than 10 us."""
    median_ns: float
    """Median duration."""
    median_gap_ns: float
    """Median length of the gaps in the union of the kernels; 0 without gaps."""
    longest_gap_ns: int
    """Longest gap in the union of kernels and copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassAccount:
    """Work of one class (of one library, dtype or kind of collective)."""

    klass: KernelClass
    """The class."""
    label: str
    """Class with library and dtype, or kind of collective: ``gemm cuBLAS bf16``."""
    num: int
    """Kernels or copies."""
    total_ns: int
    """Sum of their durations."""
    union_ns: int
    """Time in which at least one runs."""
    exposed_ns: int
    """Time in which one runs and no kernel or copy of another class does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamAccount:
    """One stream of one device."""

    device: int
    """Device number."""
    stream: int
    """Stream number."""
    busy_ns: int
    """Union of its kernels and copies."""
    num_kernels: int
    """Kernels."""
    num_copies: int
    """Copies."""
    communication_ns: int
    """Union of its communication kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseAccount:
    """Kernels and copies launched in one phase of a step."""

    phase: str
    """One of ``PHASES``."""
    num_kernels: int
    """Kernels launched in it."""
    total_ns: int
    """Sum of their durations."""
    union_ns: int
    """Time in which one of them runs."""
    exclusive_ns: int
    """Its share of the busy time (kernels and copies), where time shared by phases goes to the
    first of ``PHASES`` that runs: the shares of all phases add up to span - idle."""
    communication_ns: int
    """Union of its communication kernels."""
    host_ns: int
    """Union of its ranges on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAccount:
    """One ``ProfilerStep#N``.

    Its stretch of device time reaches from the first kernel it launched to the first kernel the
    next step launched, so the stretches of all steps tile the time from the first step's first
    kernel to the last kernel's end.
    """

    number: int
    """N."""
    host_start_ns: int
    """Start of the range on the host."""
    host_end_ns: int
    """End of the range on the host."""
    start_ns: int
    """Start of its stretch on the device."""
    end_ns: int
    """End of its stretch on the device."""
    split: Split
    """What runs in the stretch; counts are of the kernels the step launched."""
    classes: tuple[ClassAccount, ...]
    """What the step launched, by class, largest first."""
    phases: tuple[PhaseAccount, ...]
    """What the step launched, by phase; empty if the trace has no phases."""

    @property
    def host_ns(self) -> int:
        """Duration of the range on the host: the step time the program sees."""
        return self.host_end_ns - self.host_start_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveAccount:
    """Collectives of one kind whose size the trace gives."""

    kind: str
    """``all-reduce`` ..."""
    dtype: str
    """Element type as the trace names it."""
    group_size: int
    """Ranks taking part."""
    num: int
    """Kernels."""
    total_bytes: int
    """Sum of the larger of input and output, bytes."""
    total_ns: int
    """Sum of durations."""
    bus_bytes_per_s: float
    """Bus bandwidth over all of them: bytes / time x 2(n-1)/n for all-reduce, (n-1)/n for
    all-gather, reduce-scatter and all-to-all, 1 for the others."""
    slowest_bytes_per_s: float
    """Bus bandwidth of the slowest kernel."""
    fastest_bytes_per_s: float
    """Bus bandwidth of the fastest kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Everything counted about one trace. Event arrays have one entry per event of the trace."""

    trace: Trace
    """What was counted."""
    split: Split
    """Whole file."""
    kernels: KernelStats | None
    """None without kernels."""
    steps: tuple[StepAccount, ...]
    """In order of time; empty without ``ProfilerStep#N``."""
    streams: tuple[StreamAccount, ...]
    """Busiest first."""
    classes: tuple[ClassAccount, ...]
    """Largest total first."""
    phases: tuple[PhaseAccount, ...]
    """In order of ``PHASES``; empty if neither annotations nor autograd tell phases."""
    collectives: tuple[CollectiveAccount, ...]
    """Largest time first; empty if the trace gives no sizes."""
    communications: list[Communication] = field(repr=False)
    """Every communication kernel with kind, group and size, in order of start."""
    infos: list[KernelInfo] = field(repr=False)
    """What each entry of ``trace.names`` does as a kernel."""
    launch: np.ndarray = field(repr=False)
    """int64 per event: of kernels and copies the index of the call that launched it, else -1."""
    step: np.ndarray = field(repr=False)
    """int32 per event: of kernels and copies the position in ``steps``, else -1."""
    phase: np.ndarray = field(repr=False)
    """int8 per event: of kernels and copies the position in ``PHASES``, else -1."""

    def info(self, event: int) -> KernelInfo:
        """What the kernel at this index does."""
        return self.infos[self.trace.name[event]]

    @property
    def communication(self) -> np.ndarray:
        """bool per event: it is a communication kernel."""
        by_name = np.array([info.is_communication for info in self.infos], dtype=bool)
        if not len(by_name):
            return np.zeros(len(self.trace), dtype=bool)
        return (self.trace.kind == Kind.KERNEL) & by_name[self.trace.name]

    @property
    def step_ns(self) -> float | None:
        """Median host duration of a step, ns; None without steps."""
        return float(np.median([s.host_ns for s in self.steps])) if self.steps else None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAccount:
    """The accounts of all ranks of a job."""

    job: Job
    """What was counted."""
    ranks: tuple[Account, ...]
    """One per trace, in order of ``job.traces``."""
    match: RankMatch | None
    """Collectives matched over ranks; None for a single trace."""


def _percent(part_ns: int, whole_ns: int) -> float | None:
    return 100.0 * part_ns / whole_ns if whole_ns else None
