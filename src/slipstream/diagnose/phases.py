"""Which phase of a step a host call belongs to: forward, backward, recompute, optimizer.

Annotations, autograd's own ranges and Python frames tell; of nested ranges the innermost counts.
Operators that record for autograd, and modules, are forward where nothing around them is named, and
recompute where they run inside the backward of some operator.
"""

import numpy as np

from slipstream.diagnose import intervals
from slipstream.diagnose.trace import Kind, Trace

PHASES = ("forward", "backward", "recompute", "optimizer", "other")
FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER, OTHER = range(len(PHASES))
# What a range means inside others; each becomes one of the phases above.
_AUTOGRAD, _OPERATOR, _MODULE = range(10, 13)
_NONE = -1

_PATTERNS = (
    (
        OPTIMIZER,
        r"^optimizer\.(step|zero_grad)#|^(## ?)?(optimizer|zero_grad)([ _]step)?( ?##)?$"
        r"|torch/optim/.*: (step|wrapper|profile_hook_step)$|clip_grad",
    ),
    (_AUTOGRAD, r"^autograd::engine::evaluate_function: (?!.*accumulategrad)"),
    (
        BACKWARD,
        r"^autograd::engine::evaluate_function|^(## ?)?backward( ?##)?$|fsdp::.*backward"
        r"|torch/_tensor\.py\(\d+\): backward|torch/autograd/__init__\.py\(\d+\): backward",
    ),
    (
        RECOMPUTE,
        r"torch/utils/checkpoint\.py\(\d+\): (recompute_fn|unpack_hook)|^(## ?)?recompute",
    ),
    (
        FORWARD,
        r"^(## ?)?forward( ?##)?$|(distributed|sharded)\w*parallel\.forward$|fsdp::.*forward",
    ),
    (OTHER, r"dataloader|(load|copy|next|get|wait_for)_?batch|data_?load"),
    (_MODULE, r"^nn\.module: "),
)
_MARKING = (Kind.ANNOTATION, Kind.CPU_OP, Kind.PYTHON)


class PhaseMap:
    """Phases of host times, thread by thread."""

    def __init__(self, trace: Trace) -> None:
        events, phases = _markers(trace)
        self._changes: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        threads = trace.thread[events]
        for thread in np.unique(threads).tolist():
            mine = events[threads == thread]
            self._changes[thread] = _timeline(
                trace.start_ns[mine], trace.end_ns[mine], phases[threads == thread]
            )
        self.host = [self._host_intervals(phase) for phase in range(len(PHASES))]
        """Per phase the union of the times in which a thread is in it."""

    @property
    def known(self) -> bool:
        """Whether the trace tells phases at all."""
        return any((phases != OTHER).any() for _, phases in self._changes.values())

    def at(self, thread: np.ndarray, at_ns: np.ndarray) -> np.ndarray:
        """int8: position in ``PHASES`` of each time on each thread."""
        found = np.full(len(at_ns), OTHER, dtype=np.int8)
        for number, (times, phases) in self._changes.items():
            here = np.flatnonzero(thread == number)
            row = np.searchsorted(times, at_ns[here], side="right") - 1
            found[here] = np.where(row >= 0, phases[np.maximum(row, 0)], OTHER)
        return found

    def _host_intervals(self, phase: int) -> np.ndarray:
        parts = [np.empty((0, 2), dtype=np.int64)]
        for times, phases in self._changes.values():
            inside = np.flatnonzero(phases[:-1] == phase)
            parts.append(np.stack([times[inside], times[inside + 1]], axis=1))
        return intervals.union(np.concatenate(parts))


def _markers(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Events that set a phase, in order of start, and what each stands for."""
    by_name = np.full(len(trace.names), _NONE, dtype=np.int8)
    for phase, pattern in reversed(_PATTERNS):
        by_name[trace.named(pattern)] = phase
    host = np.isin(trace.kind, np.array(_MARKING, dtype=np.uint8))
    found = np.full(len(trace), _NONE, dtype=np.int8)
    found[host] = by_name[trace.name[host]]
    records = (trace.kind == Kind.CPU_OP) & (trace.sequence >= 0) & (trace.forward_thread <= 0)
    found[records & (found == _NONE)] = _OPERATOR
    events = np.flatnonzero(found != _NONE)
    return events, found[events]


def _timeline(
    starts: np.ndarray, ends: np.ndarray, markers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Times at which the phase of a thread changes, and the phase from each on."""
    times: list[int] = []
    values: list[int] = []
    stack: list[tuple[int, int, bool]] = []

    def close(until: int) -> None:
        while stack and stack[-1][0] <= until:
            end, _, _ = stack.pop()
            times.append(end)
            values.append(stack[-1][1] if stack else OTHER)

    for start, end, marker in zip(starts.tolist(), ends.tolist(), markers.tolist(), strict=True):
        close(start)
        around, in_autograd = stack[-1][1:] if stack else (_NONE, False)
        phase = _inside(around, in_autograd, marker)
        # A range that outlasts the one around it (clocks, cut files) ends with it.
        end = min(end, stack[-1][0]) if stack else end
        stack.append((end, phase, marker == _AUTOGRAD or (in_autograd and phase == around)))
        times.append(start)
        values.append(phase)
    close(np.iinfo(np.int64).max)
    return np.array(times, dtype=np.int64), np.array(values, dtype=np.int8)


def _inside(around: int, in_autograd: bool, marker: int) -> int:
    """The phase of a range inside one of phase ``around``.

    ``in_autograd``: autograd runs an operator's backward there. Accumulating a gradient is none:
    hooks on it (buckets of data parallel) work on gradients and record, without recomputing.
    """
    if marker == _AUTOGRAD:
        return BACKWARD
    if marker == _OPERATOR:
        if around == _NONE:
            return FORWARD
        return RECOMPUTE if around == BACKWARD and in_autograd else around
    if marker in (_MODULE, FORWARD) and around in (BACKWARD, RECOMPUTE):
        return RECOMPUTE
    if marker == _MODULE:
        return FORWARD if around == _NONE else around
    return marker
