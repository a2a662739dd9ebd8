"""What each communication kernel carries: kind, process group, bytes, from its arguments, from the
host call around its launch, and last from its name.
"""

import re
from dataclasses import dataclass

import numpy as np

from slipstream.diagnose.classify import KernelInfo
from slipstream.diagnose.trace import Kind, Trace

_KINDS = (
    ("all-reduce", r"all_?reduce"),
    ("reduce-scatter", r"reduce_?scatter"),
    ("all-gather", r"all_?gather"),
    ("all-to-all", r"all_?to_?all"),
    ("broadcast", r"broadcast"),
    ("send/recv", r"send|recv"),
    ("reduce", r"reduce"),
    ("gather", r"gather"),
    ("scatter", r"scatter"),
)
_BYTES = {
    "double": 8,
    "long": 8,
    "int64": 8,
    "float64": 8,
    "float": 4,
    "float32": 4,
    "int": 4,
    "int32": 4,
    "half": 2,
    "float16": 2,
    "bfloat16": 2,
    "short": 2,
    "byte": 1,
    "char": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
_HOST_RANGE = r"^(nccl|c10d|rccl)[:.]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """One communication kernel."""

    event: int
    """Index in the trace."""
    kind: str
    """``all-reduce`` ..., ``unknown`` if nothing tells."""
    kernel_kind: str
    """The kind the kernel alone tells, the same on ranks that saw the launch and that did not."""
    group: str | None
    """Name and ranks of the process group, None if not told."""
    kernel_group: str | None
    """The group the kernel alone tells."""
    group_size: int | None
    """Ranks taking part, None if not told."""
    dtype: str | None
    """Element type as PyTorch names it, None if not told."""
    num_bytes: int | None
    """The larger of input and output, None if not told."""


def communications(
    trace: Trace, infos: list[KernelInfo], launch: np.ndarray
) -> list[Communication]:
    """Every communication kernel of the trace, in order of start."""
    is_comm = np.array([info.is_communication for info in infos], dtype=bool)
    kernels = trace.of_kind(Kind.KERNEL)
    kernels = kernels[is_comm[trace.name[kernels]]] if len(infos) else kernels
    around = _host_ranges(trace, launch[kernels])
    return [
        _communication(trace, infos, event, host)
        for event, host in zip(kernels.tolist(), around.tolist(), strict=True)
    ]


def bus_factor(kind: str, group_size: int) -> float:
    """Bytes on the busiest link over bytes of the collective, for ring algorithms."""
    share = (group_size - 1) / group_size
    if kind == "all-reduce":
        return 2 * share
    return share if kind in ("all-gather", "reduce-scatter", "all-to-all") else 1.0


def _communication(trace: Trace, infos: list[KernelInfo], event: int, host: int) -> Communication:
    args = trace.args(event)
    host_args = trace.args(host) if host >= 0 else {}
    info = infos[trace.name[event]]
    kernel_kind = _kind(str(args.get("Collective name", ""))) or info.collective or "unknown"
    kernel_group = _group(args)
    if "Collective name" not in args:
        args = host_args
    kind = _kind(str(args.get("Collective name", "")))
    if kind is None and info.collective in (None, "unknown", "send/recv") and host >= 0:
        kind = _kind(trace.name_of(host))
    size = args.get("Group size")
    return Communication(
        event=event,
        kind=kind or kernel_kind,
        kernel_kind=kernel_kind,
        group=_group(args),
        kernel_group=kernel_group,
        group_size=size if type(size) is int and 0 < size < 2**31 else None,
        dtype=str(args["dtype"]) if "dtype" in args else None,
        num_bytes=_num_bytes(args),
    )


def _kind(text: str) -> str | None:
    return next((kind for kind, pattern in _KINDS if re.search(pattern, text.lower())), None)


def _group(args: dict) -> str | None:
    name, ranks = args.get("Process Group Name"), args.get("Process Group Ranks")
    if name is None and ranks is None:
        return None
    return f"{name if name is not None else '?'} {ranks if ranks is not None else ''}".strip()


def _num_bytes(args: dict) -> int | None:
    counts = [args.get("In msg nelems"), args.get("Out msg nelems")]
    width = _BYTES.get(str(args.get("dtype", "")).lower())
    known = [count for count in counts if type(count) is int and 0 <= count < 2**53]
    return max(known) * width if known and width else None


def _host_ranges(trace: Trace, launch: np.ndarray) -> np.ndarray:
    """int64: of each launch the latest-starting host range of a collective around it, else -1."""
    described = np.array(["Collective name" in detail for detail in trace.details], dtype=bool)
    named = trace.named(_HOST_RANGE)[trace.name] if len(trace.names) else np.zeros(0, dtype=bool)
    if len(described):
        named = named | ((trace.detail >= 0) & described[np.maximum(trace.detail, 0)])
    host = np.isin(trace.kind, np.array((Kind.ANNOTATION, Kind.CPU_OP), dtype=np.uint8))
    ranges = np.flatnonzero(named & host)
    found = np.full(len(launch), -1, dtype=np.int64)
    for row, call in enumerate(launch.tolist()):
        if call < 0:
            continue
        at_ns, thread = trace.start_ns[call], trace.thread[call]
        stop = np.searchsorted(trace.start_ns[ranges], at_ns, side="right")
        # Ranges of one collective nest a few deep; others of the thread have ended by then.
        for candidate in ranges[max(0, stop - 64) : stop][::-1].tolist():
            if trace.thread[candidate] == thread and at_ns < trace.end_ns[candidate]:
                found[row] = candidate
                break
    return found
