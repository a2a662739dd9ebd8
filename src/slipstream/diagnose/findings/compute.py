"""Kernels that could be fewer, faster or left out: what the device itself spends."""

import numpy as np

from slipstream.diagnose import intervals
from slipstream.diagnose.classify import KernelClass
from slipstream.diagnose.findings.context import Found, View, longest, ms
from slipstream.diagnose.findings.model import Abstention, Confidence
from slipstream.diagnose.idle import LAUNCH_NS
from slipstream.diagnose.phases import PHASES
from slipstream.diagnose.roofline import num_elements, roofline
from slipstream.diagnose.trace import Kind

_FUSIBLE = frozenset(
    {KernelClass.POINTWISE, KernelClass.NORM, KernelClass.REDUCTION, KernelClass.LOSS}
)
_PRODUCTS = frozenset({KernelClass.GEMM, KernelClass.GROUPED_GEMM, KernelClass.CONVOLUTION})
_STAYS = 1 / 3
"""Of a kernel that reads two tensors and writes one, fusion into its neighbour leaves one read."""
_TENSOR_CORES_SINCE = 7
"""Compute capability (major) of the first NVIDIA devices with tensor cores."""


def memory_bound(view: View) -> Found:
    """Memory-bound operators against the device's memory rate."""
    roofs = roofline(view.account)
    if roofs.problem is not None:
        yield Abstention("memory-bound", roofs.problem)
        return
    assert roofs.spec is not None
    judged = [one for one in roofs.operators if one.is_memory_bound]
    long = [one for one in judged if one.dur_ns >= LAUNCH_NS]
    lost = np.array([max(0.0, one.dur_ns - one.ideal_ns) for one in long])
    kernels = np.array([one.kernel for one in long], dtype=np.int64)
    moved = sum(one.work.bytes for one in long)
    spent = sum(one.dur_ns for one in long)
    if not spent:
        return
    yield from view.finding(
        "memory-bound",
        float(lost.sum()),
        "memory-bound kernels below the memory rate",
        confidence=Confidence.MEDIUM,
        evidence={
            "memory_bound_ms": ms(sum(one.dur_ns for one in judged)),
            "arithmetic_bound_ms": ms(
                sum(one.dur_ns for one in roofs.operators if not one.is_memory_bound)
            ),
            "judged_pct": round(roofs.covered_pct, 1),
            "attained_bytes_per_s": 1e9 * moved / spent,
            "peak_bytes_per_s": roofs.spec.bytes_per_s,
            "source_of_peak": roofs.spec.source,
        },
        kernels=view.top_names(kernels, lost),
    )


def tensor_cores(view: View) -> Found:
    """Matrix products whose kernels do not use tensor cores."""
    major = view.trace.device_props.get("computeMajor")
    name = view.trace.device_name or ""
    if not name.startswith(("NVIDIA", "Tesla")) or not isinstance(major, int):
        return
    if major < _TENSOR_CORES_SINCE:
        return
    plain = np.array(
        [info.klass in _PRODUCTS and info.tensor_cores is False for info in view.account.infos],
        dtype=bool,
    )
    kernels = view.kernels[plain[view.trace.name[view.kernels]]]
    spent = view.trace.dur_ns[kernels]
    yield from view.finding(
        "tensor-cores-unused",
        spent.sum() / 2,
        "matrix products without tensor cores",
        confidence=Confidence.LOW,
        evidence={"kernels": len(kernels), "their_time_ms": ms(spent.sum())},
        kernels=view.top_names(kernels, spent),
    )


def recompute(view: View) -> Found:
    """Forward work done again inside backward."""
    if not view.account.phases:
        return
    again = view.account.phase[view.kernels] == PHASES.index("recompute")
    kernels = view.kernels[again & ~view.is_communication]
    spans = intervals.union(view.trace.intervals(kernels))
    spent = intervals.measure(spans)
    compute = view.account.split.compute_ns
    yield from view.finding(
        "recompute-cost",
        spent,
        "activations computed again in backward",
        confidence=Confidence.LOW,
        evidence={
            "kernels": len(kernels),
            "share_of_compute_pct": round(100 * spent / compute, 1) if compute else None,
        },
        kernels=view.top_names(kernels, view.trace.dur_ns[kernels]),
        where=longest(spans),
        detail="Gone only where memory allows to keep all activations.",
    )


def chains(view: View) -> Found:
    """Runs of small memory-bound kernels that one fused kernel would replace."""
    sizes = _sizes(view)
    if not sizes.any():
        reason = "without operator shapes it is not known which kernels work on the same tensor"
        yield Abstention("fusible-chains", reason)
        return
    runs = _runs(view, sizes)
    if not runs:
        return
    duration, names = view.trace.dur_ns, view.trace.name
    saved = np.array([_saving(duration[run]) for run in runs])
    together = np.concatenate(runs)
    best = runs[int(np.argmax(saved))]
    end = int(view.trace.end_ns[best].max())
    yield from view.finding(
        "fusible-chains",
        float(saved.sum()),
        "chains of kernels that could be one",
        confidence=Confidence.MEDIUM,
        evidence={
            "chains": len(runs),
            "kernels": len(together),
            "their_time_ms": ms(duration[together].sum()),
            "longest_chain": len(max(runs, key=len)),
        },
        kernels=tuple(dict.fromkeys(view.trace.names[name] for name in names[best]))[:3],
        where=np.array([view.trace.start_ns[best[0]], end], dtype=np.int64),
    )


def _runs(view: View, sizes: np.ndarray) -> list[np.ndarray]:
    """Maximal runs of fusible kernels of one stream and size, of two or more operators."""
    trace, kernels = view.trace, view.kernels
    # Of operators such as convolutions, whose own kernels nobody else can fuse, none counts.
    fusible = np.array([i.klass in _FUSIBLE and i.library != "Triton" for i in view.account.infos])
    ok = fusible[trace.name[kernels]]
    ok &= ~np.isin(view.operators, np.unique(view.operators[~ok])) & (sizes > 0)
    copies = trace.of_kind(Kind.COPY)
    runs = []
    streams, of_copies = _streams(view, kernels), _streams(view, copies)
    for stream in np.unique(streams):
        row = np.flatnonzero(streams == stream)
        value = np.where(ok[row], sizes[row], 0)
        between = np.searchsorted(copies[of_copies == stream], kernels[row])
        cuts = np.flatnonzero((np.diff(value) != 0) | (np.diff(between) != 0)) + 1
        runs += [run for run in np.split(row, cuts) if ok[run[0]]]
    owner = view.operators
    return [kernels[run] for run in runs if (owner[run] != owner[run[0]]).any()]


def _streams(view: View, events: np.ndarray) -> np.ndarray:
    """int64: device and stream of each event in one number."""
    return view.trace.device[events].astype(np.int64) << 32 | (view.trace.stream[events] + 1)


def _sizes(view: View) -> np.ndarray:
    """int64 per kernel: elements of the largest input of its operator, 0 if not known."""
    trace = view.trace
    known = np.array(
        [*(_largest(one.get("Input Dims")) for one in trace.details), 0], dtype=np.int64
    )
    # Row -1 is the zero at the end: of a kernel without an operator, and one without arguments.
    row = np.where(view.operators >= 0, trace.detail[view.operators], -1)
    return known[row]


def _largest(dims: object) -> int:
    shapes = dims if isinstance(dims, list | tuple) else ()
    return max((num_elements(shape) or 0 for shape in shapes), default=0)


def _saving(durations: np.ndarray) -> float:
    """What fusing a chain saves: all but its longest kernel, and a third of the others."""
    return float((durations.sum() - durations.max()) * (1 - _STAYS))
