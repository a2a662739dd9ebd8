"""Times of several variants, taken in turns so that clocks and heat treat all alike.

Every repetition runs each variant once; the order rotates. Before each call the L2 cache is
flushed, by so many writes that the host has enqueued the whole call before the device gets to it:
device time is then free of launch gaps, and host time is kept apart. On a CPU both are wall time.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from slipstream.hw.capture import captured
from slipstream.ops import ahead

Call = Callable[[], object]
MIN_FLUSH_BYTES = 2**27
MAX_FLUSHES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """n samples in short."""

    n: int
    """Samples."""
    median: float
    """Middle sample."""
    p10: float
    """A tenth of the samples lie below."""
    p90: float
    """A tenth of the samples lie above."""

    @classmethod
    def of(cls, samples: list[float]) -> "Quantiles":
        """Of at least one sample."""
        values = torch.tensor(samples, dtype=torch.float64)
        p10, median, p90 = (values.quantile(q).item() for q in (0.1, 0.5, 0.9))
        return cls(n=len(samples), median=median, p10=p10, p90=p90)

    def row(self) -> dict[str, Any]:
        """As JSON, to a tenth of a microsecond where the unit is ms."""
        return {k: v if k == "n" else round(v, 4) for k, v in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of one variant."""

    device_ms: Quantiles
    """From the first kernel's turn to the end of the last; wall time on a CPU."""
    host_ms: Quantiles
    """Until the call returned to Python, not waiting for the device."""


def interleaved(
    variants: dict[str, Call],
    device: torch.device,
    *,
    warmup: int = 5,
    repetitions: int = 30,
    before: Mapping[str, Call] | None = None,
) -> dict[str, Timing]:
    """Time every variant ``repetitions`` times after ``warmup`` untimed turns of all.

    ``before``: what runs untimed ahead of each turn of a variant, if anything.
    """
    clock = _CudaClock(device) if device.type == "cuda" else _HostClock()
    names, prepare = list(variants), before or {}
    for _ in range(warmup):
        for name in names:
            if name in prepare:
                prepare[name]()
            clock.warm(name, variants[name])
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(repetitions):
        start = turn % len(names) if names else 0
        for name in names[start:] + names[:start]:
            if name in prepare:
                prepare[name]()
            samples[name].append(clock.time(name, variants[name]))
    return {
        name: Timing(
            device_ms=Quantiles.of([device_ms for device_ms, _ in taken]),
            host_ms=Quantiles.of([host_ms for _, host_ms in taken]),
        )
        for name, taken in samples.items()
    }


def graphed(call: Call, device: torch.device) -> Call:
    """Capture ``call`` as a CUDA graph and return its replay. Raises what capturing raises."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    ahead.settle()
    graph, kept = captured(call, side)

    def replay() -> object:
        graph.replay()
        return kept

    return replay


class _HostClock:
    def warm(self, name: str, call: Call) -> None:
        call()

    def time(self, name: str, call: Call) -> tuple[float, float]:
        begin = time.perf_counter()
        call()
        elapsed = (time.perf_counter() - begin) * 1e3
        return elapsed, elapsed


class _CudaClock:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        size = max(2 * cache, MIN_FLUSH_BYTES)
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self.flush_ms = min(self._events(self.buffer.zero_)[0] for _ in range(10))
        self.host_ms: dict[str, float] = {}

    def warm(self, name: str, call: Call) -> None:
        _, host_ms = self._events(call)
        # The last warm-up counts: the first ones compile.
        self.host_ms[name] = host_ms

    def time(self, name: str, call: Call) -> tuple[float, float]:
        ahead = 2.0 * self.host_ms.get(name, 0.0) / self.flush_ms
        for _ in range(min(1 + math.ceil(ahead), MAX_FLUSHES)):
            self.buffer.zero_()
        device_ms, host_ms = self._events(call)
        # The host's time varies: one slow turn, with gaps in it, must not be followed by more.
        self.host_ms[name] = max(self.host_ms.get(name, 0.0), host_ms)
        return device_ms, host_ms

    def _events(self, call: Call) -> tuple[float, float]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        started = time.perf_counter()
        call()
        host_ms = (time.perf_counter() - started) * 1e3
        end.record()
        end.synchronize()
        return begin.elapsed_time(end), host_ms
