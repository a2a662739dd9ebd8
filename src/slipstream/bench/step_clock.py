"""Times of a training step by phase: device time from events in the stream, host time apart."""

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One step."""

    step_ms: float
    """From the end of the step before it, so that gaps between steps count."""
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    host_ms: float
    """Until the step's calls had returned."""


class Trained(Protocol):
    """What the clock runs."""

    def loss(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        """Forward."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Backward."""
        ...

    def update(self) -> None:
        """Optimizer step."""
        ...

    @property
    def attention(self) -> Any:
        """Makes the context of forward and backward."""
        ...


class Clock:
    """Runs steps and keeps their marks until they are read."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._marks: list[tuple[list[Any], float]] = []

    def step(self, trained: Trained, tokens_BL: torch.Tensor) -> torch.Tensor:
        """One training step; returns the loss, which is not waited for."""
        started = time.perf_counter()
        marks = [self._mark()]
        with trained.attention():
            loss = trained.loss(tokens_BL)
            marks.append(self._mark())
            trained.backward(loss)
        marks.append(self._mark())
        trained.update()
        marks.append(self._mark())
        self._marks.append((marks, 1e3 * (time.perf_counter() - started)))
        return loss.detach()

    def read(self) -> list[StepTimes]:
        """Wait for the steps since the last reading and return their times."""
        taken, self._marks = self._marks, []
        if self.cuda and taken:
            taken[-1][0][-1].synchronize()
        found = []
        before = None
        for marks, host_ms in taken:
            phases = [self._between(a, b) for a, b in pairwise(marks)]
            found.append(
                StepTimes(
                    step_ms=self._between(marks[0] if before is None else before, marks[-1]),
                    forward_ms=phases[0],
                    backward_ms=phases[1],
                    optimizer_ms=phases[2],
                    host_ms=host_ms,
                )
            )
            before = marks[-1]
        return found

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) if self.cuda else 1e3 * (end - begin)
