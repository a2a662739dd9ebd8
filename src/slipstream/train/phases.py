"""How long each phase of a step takes on the device.

On a GPU, events are recorded around the phases and read after the step, so timing never waits. In a
profile each phase is a range, ``## forward ##`` and so on.
"""

import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch.profiler import record_function

PHASES = ("data", "forward", "backward", "optimizer")
GRAPH_PHASES = ("data", "graph", "optimizer")
"""With forward and backward in one CUDA graph."""


class PhaseTimer:
    """Milliseconds per phase, summed over the micro-batches of a step."""

    def __init__(self, device: torch.device, phases: tuple[str, ...] = PHASES) -> None:
        self.on_gpu, self.phases = device.type == "cuda", phases
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._host_ms: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str, *, host: bool = False) -> Generator[None]:
        """Time a block as part of ``phase``; ``host``: by the host's clock on a GPU as well."""
        name = f"## {phase} ##"
        if self.on_gpu and not host:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            with record_function(name):
                yield
            stop.record()
            self._events.append((phase, start, stop))
            return
        begin = time.perf_counter()
        with record_function(name):
            yield
        self._host_ms[phase] += 1e3 * (time.perf_counter() - begin)

    def enqueued(self, begin: float) -> None:
        """Everything of the step that ``begin``, a ``perf_counter``, started is enqueued."""
        self._host_ms["host"] += 1e3 * (time.perf_counter() - begin)

    def take(self) -> dict[str, float]:
        """Milliseconds per phase since the last call; the device must have finished the step.

        ``host``: of the host's clock, until the step was enqueued.
        """
        spent = dict.fromkeys(self.phases, 0.0) | dict(self._host_ms)
        for phase, start, stop in self._events:
            spent[phase] += start.elapsed_time(stop)
        self._events.clear()
        self._host_ms.clear()
        return spent
