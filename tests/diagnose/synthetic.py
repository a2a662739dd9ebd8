"""Traces with known splits, and the splits by brute force: one boolean per nanosecond."""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

COMPUTE = "compute"
COMMUNICATION = "communication"
COPY = "copy"
NAMES = {
    COMPUTE: ("kernel", "void at::native::vectorized_elementwise_kernel<4>"),
    COMMUNICATION: ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
    COPY: ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)"),
}


@dataclass(frozen=True)
class Block:
    """One kernel or copy."""

    what: str
    start_ns: int
    dur_ns: int
    stream: int = 7
    args: tuple[tuple[str, Any], ...] = ()


def us(ns: int) -> str:
    """Microseconds as decimal text, exact."""
    sign = "-" if ns < 0 else ""
    return f"{sign}{abs(ns) // 1000}.{abs(ns) % 1000:03d}"


def event(block: Block, correlation: int) -> dict[str, Any]:
    """The block as an event whose times are placeholders for ``dumps``."""
    category, name = NAMES[block.what]
    args = {"device": 0, "stream": block.stream, "correlation": correlation, **dict(block.args)}
    return host(category, name, block.start_ns, block.dur_ns, pid=0, tid=block.stream, **args)


def host(
    category: str, name: str, start_ns: int, dur_ns: int, *, pid: int = 1, tid: int = 1, **args: Any
) -> dict[str, Any]:
    """A complete event; times in ns."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start_ns,
        "dur": dur_ns,
        "args": args,
    }


def dumps(events: list[dict[str, Any]], *, quoted: bool = False, **metadata: Any) -> bytes:
    """A trace; the times of the events, in ns, are written in us with three decimals."""
    texts = []
    for one in events:
        times = {key: one[key] for key in ("ts", "dur") if key in one}
        rest = json.dumps({key: value for key, value in one.items() if key not in times})
        quote = '"' if quoted else ""
        written = "".join(f', "{key}": {quote}{us(value)}{quote}' for key, value in times.items())
        texts.append(rest[:-1] + written + "}")
    head = json.dumps(metadata)[:-1]
    return f'{head}{", " if metadata else ""}"traceEvents": [{", ".join(texts)}]}}'.encode()


def blocks_trace(blocks: list[Block], **metadata: Any) -> bytes:
    """A trace of these blocks alone."""
    return dumps([event(block, row + 1) for row, block in enumerate(blocks)], **metadata)


def write(path: Path, content: bytes) -> Path:
    """Write a trace, compressed if its name says so."""
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)
    return path


def expected(blocks: list[Block]) -> dict[str, int]:
    """The split of these blocks, counted nanosecond by nanosecond."""
    if not blocks:
        return dict.fromkeys(("span", "compute", "exposed_comm", "exposed_copies", "idle"), 0)
    first = min(block.start_ns for block in blocks)
    last = max(block.start_ns + block.dur_ns for block in blocks)
    on = {what: np.zeros(last - first, dtype=bool) for what in NAMES}
    for block in blocks:
        on[block.what][block.start_ns - first : block.start_ns - first + block.dur_ns] = True
    compute, communication, copies = on[COMPUTE], on[COMMUNICATION], on[COPY]
    return {
        "span": last - first,
        "compute": int(compute.sum()),
        "exposed_comm": int((communication & ~compute).sum()),
        "exposed_copies": int((copies & ~compute & ~communication).sum()),
        "idle": int((~(compute | communication | copies)).sum()),
    }


def launched(
    name: str, launch_ns: int, start_ns: int, dur_ns: int, correlation: int, *, tid: int = 1
) -> list[dict[str, Any]]:
    """A kernel and the call that launched it."""
    call = host(
        "cuda_runtime", "cudaLaunchKernel", launch_ns, 5000, tid=tid, correlation=correlation
    )
    kernel = host(
        "kernel",
        name,
        start_ns,
        dur_ns,
        pid=0,
        tid=7,
        device=0,
        stream=7,
        correlation=correlation,
    )
    return [call, kernel]
