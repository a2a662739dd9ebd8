"""How fast tensors travel to the host and back while the device computes, and where they may go."""

import math
import os
import statistics
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from slipstream.nn.offload import PIECE_BYTES, pinned
from slipstream.recompute.cost import Link
from slipstream.recompute.meter import Meter

REPEATS = 5
COUNTED = 0.95
"""Of the measured rate, what plans count on: a copy that is late is waited for."""
HOST_SHARE = 0.5
"""Of the host's available memory: pinned pages are lost to everybody else."""


def measure_link(meter: Meter, compute: Callable[[], object]) -> Link:
    """Copies beside ``compute()``, and what they cost it."""
    if not meter.on_gpu:
        return _measure_clone(meter)
    here = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=meter.device)
    there = pinned(PIECE_BYTES)
    out, slow_out = _measure(meter, compute, there, here)
    back, slow_back = _measure(meter, compute, here, there)
    return Link(
        out_bytes_per_ms=out, back_bytes_per_ms=back, slowdown_ms_per_byte=slow_out + slow_back
    )


def host_bytes() -> int:
    """The host's memory that one process may pin: its share of half of what is available."""
    share = HOST_SHARE / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(share * min(_available(), _allowed()))


def _measure(
    meter: Meter, compute: Callable[[], object], into: torch.Tensor, out_of: torch.Tensor
) -> tuple[float, float]:
    """Bytes per ms to count on, and the ms that each adds to what is computed meanwhile."""
    stream = torch.cuda.Stream(meter.device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def copies(count: int) -> None:
        with torch.cuda.stream(stream):
            marks[0].record()
            for _ in range(count):
                into.copy_(out_of, non_blocking=True)
            marks[1].record()

    def both() -> None:
        # As in a step: the copies wait for what came before them.
        stream.wait_stream(torch.cuda.current_stream(meter.device))
        copies(count)
        compute()

    copies(2)
    stream.synchronize()
    single = marks[0].elapsed_time(marks[1]) / 2
    alone, beside, took = [], [], []
    count = max(1, int(meter.time(compute) / single))
    for _ in range(REPEATS):
        alone.append(meter.time(compute))
        beside.append(meter.time(both))
        stream.synchronize()
        took.append(marks[0].elapsed_time(marks[1]))
    moved = count * into.numel()
    slower = statistics.median(beside) - statistics.median(alone)
    return COUNTED * moved / max(took), max(0.0, slower) / moved


def _measure_clone(meter: Meter) -> Link:
    # There is no one to copy meanwhile: all of it delays.
    source = torch.zeros(1 << 22, dtype=torch.uint8)
    ms = min(meter.time(source.clone) for _ in range(REPEATS))
    return Link(
        out_bytes_per_ms=math.inf,
        back_bytes_per_ms=math.inf,
        slowdown_ms_per_byte=2 * ms / source.numel(),
    )


def _available() -> float:
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return 1024 * int(value.split()[0])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _allowed() -> float:
    """What a container may still take; its files' pages are the kernel's to drop."""
    group = Path("/sys/fs/cgroup")
    for limit, used, inactive in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):
            most, now = (int((group / name).read_text(encoding="ascii")) for name in (limit, used))
            stat = (group / limit).with_name("memory.stat").read_text(encoding="ascii")
            files = dict(line.split() for line in stat.splitlines()).get(inactive, "0")
            return max(0, most - now + int(files))
    return math.inf
