"""Whole training steps of one model in several stacks: same weights, same batches, in turns.

Arms are built one after another and share nothing. Blocks of steps alternate, the order rotates;
an arm that waits is parked on the host where memory is short. Steps are timed without waiting for
each other; host time is taken from steps of their own, which begin with an idle device.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.bench.environment import environment
from slipstream.bench.ops import Yardstick
from slipstream.bench.ops_case import Missing
from slipstream.bench.results import Row
from slipstream.bench.step_arms import AUTO_SHARE, Arm, Setting, make_arm
from slipstream.bench.step_clock import Clock, StepTimes
from slipstream.bench.step_figures import figures
from slipstream.bench.step_model import StepModel, random_tokens
from slipstream.bench.step_park import Parking, who_leaves
from slipstream.bench.timing import interleaved
from slipstream.hw import peak_memory_bytes, reset_peak_memory
from slipstream.ops import dispatch

WARM_UP, SETTLE, HOST_STEPS = 4, 2, 2
USABLE = 0.94
"""Share of the device's memory that arms may fill; the rest is the allocator's and CUDA's."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """What to measure."""

    model: StepModel
    arms: list[str]
    device: torch.device
    steps: int = 10
    """Timed steps of a block."""
    rounds: int = 3
    """Blocks of every arm."""
    lr: float = 1e-4
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class _Entry:
    """An arm and what was measured of it."""

    name: str
    row: Row
    arm: Arm | None = None
    parking: Parking | None = None
    clock: Clock
    losses: list[torch.Tensor] = field(default_factory=list)
    """One per step, timed or not: the same batches in every arm."""
    blocks: list[list[StepTimes]] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def bench_step(request: StepRequest, say: Say) -> Generator[Row]:
    """Measure all arms; yields one row per arm when all are done. ``say`` gets progress."""
    where = environment(request.device)
    session = _Session(request, where, say)
    for name in request.arms:
        session.start(name)
    for turn in range(request.rounds):
        running = session.running()
        first = turn % len(running) if running else 0
        for entry in running[first:] + running[:first]:
            session.block(entry)
    yield from session.rows()


class _Session:
    def __init__(self, request: StepRequest, where: dict[str, Any], say: Say) -> None:
        self.request, self.say = request, say
        self.product_flops_per_s = _product_rate(request.device)
        head = {"case": "step", **request.model.row(), "dtype": "bfloat16"}
        head |= {"rounds": request.rounds, "steps": request.steps, "warmup": WARM_UP}
        self.head = head | {"settle": SETTLE, "lr": request.lr} | where
        self.entries: list[_Entry] = []

    def running(self) -> list[_Entry]:
        """Arms that work."""
        return [entry for entry in self.entries if entry.arm is not None]

    def start(self, name: str) -> None:
        """Build an arm and warm it up."""
        request = self.request
        entry = _Entry(name=name, row={**self.head, "arm": name}, clock=Clock(request.device))
        self.entries.append(entry)
        self._make_room(entry)
        before = dispatch.counts()
        started = time.perf_counter()
        try:
            entry.arm = make_arm(name, self._setting(name))
            self._run(entry, 1)
            entry.row["first_step_s"] = round(time.perf_counter() - started, 2)
            # The first step makes the optimizer's state and may compile; its peak is its own.
            entry.peak_bytes = 0
            self._run(entry, WARM_UP - 1)
            entry.parking = entry.arm.parking()
        except Missing as missing:
            self._drop(entry, "absent", str(missing))
        # Whatever an arm raises, the others are still measured.
        except Exception as error:
            self._drop(entry, "failed", _described(error))
        else:
            used = {key: n - before.get(key, 0) for key, n in dispatch.counts().items()}
            entry.row["implementations"] = sorted(f"{o}={i}" for (o, i), n in used.items() if n)
            self.say(f"  {name}: peak {entry.peak_bytes / 2**30:.1f} GiB")
        _collect(request.device)

    def block(self, entry: _Entry) -> None:
        """Timed steps of one arm."""
        self._make_room(entry)
        assert entry.parking is not None
        try:
            entry.parking.come_back()
            self._run(entry, SETTLE)
            times = self._run(entry, self.request.steps)
            for _ in range(HOST_STEPS):
                _synchronize(self.request.device)
                (found,) = self._run(entry, 1)
                entry.host_ms.append(found.host_ms)
        # Memory may run out once all arms are there.
        except Exception as error:
            self._drop(entry, "failed", _described(error))
        else:
            entry.blocks.append(times)
            median = statistics.median(step.step_ms for step in times)
            self.say(f"  {entry.name}: {median:.1f} ms a step")
        _collect(self.request.device)

    def rows(self) -> Generator[Row]:
        """One per arm, the first one's losses as the measure of the others'."""
        reference = next(iter(self.running()), None)
        for entry in self.entries:
            if entry.arm is not None and reference is not None:
                entry.row |= self._gate(entry, reference)
            if entry.row["status"] == "ok" and reference is not None:
                entry.row |= figures(
                    self.request.model,
                    entry.blocks,
                    entry.host_ms,
                    reference.blocks if entry is not reference else None,
                    product_flops_per_s=self.product_flops_per_s,
                    device=self.request.device,
                )
                entry.row |= self._memory_row(entry)
            yield entry.row

    def _run(self, entry: _Entry, steps: int) -> list[StepTimes]:
        arm, request = entry.arm, self.request
        assert arm is not None
        device = request.device
        others = self._others(entry)
        reset_peak_memory(device)
        for _ in range(steps):
            tokens_BL = random_tokens(request.model, len(entry.losses), device)
            entry.losses.append(entry.clock.step(arm, tokens_BL))
        times = entry.clock.read()
        entry.peak_bytes = max(entry.peak_bytes, peak_memory_bytes(device) - others)
        return times

    def _others(self, entry: _Entry) -> int:
        # The peak of a CPU is that of the process, arms that wait included.
        if self.request.device.type != "cuda":
            return 0
        return sum(
            other.parking.nbytes
            for other in self.entries
            if other is not entry and other.parking is not None and not other.parking.parked
        )

    def _make_room(self, entry: _Entry) -> None:
        if self.request.device.type != "cuda":
            return
        total = torch.cuda.get_device_properties(self.request.device).total_memory
        idle = sum(e.arm.idle_bytes for e in self.running() if e.arm is not None)
        parkings = {e.name: e.parking for e in self.entries if e.parking is not None}
        # A new arm is taken to need what the hungriest one so far did.
        peaks = [e.peak_bytes for e in self.entries]
        own = entry.parking.nbytes if entry.parking is not None else 0
        working = (entry.peak_bytes or max(peaks)) - own
        for name in who_leaves(
            entry.name, parkings, working_bytes=working, total_bytes=int(USABLE * total) - idle
        ):
            self.say(f"  {name} waits on the host")
            parkings[name].leave()
        _collect(self.request.device)

    def _setting(self, name: str) -> Setting:
        request = self.request
        cuda = request.device.type == "cuda"
        return Setting(
            model=request.model,
            device=request.device,
            seed=request.seed,
            lr=request.lr,
            tokens_BL=random_tokens(request.model, 0, request.device),
            budget_bytes=self._budget(name),
            others_bytes=torch.cuda.memory_allocated(request.device) if cuda else 0,
        )

    def _budget(self, name: str) -> int | None:
        if name != "slipstream-auto":
            return None
        peaks = {e.name: e.peak_bytes for e in self.running()}
        if "slipstream" not in peaks:
            raise Missing("it plans for a share of the peak of slipstream; name that arm before it")
        return int(AUTO_SHARE * peaks["slipstream"])

    def _gate(self, entry: _Entry, reference: _Entry) -> Row:
        """Losses on the same batches: finite, and at first equal to a rounding of bf16."""
        own, theirs = (torch.stack(e.losses).double().tolist() for e in (entry, reference))
        pairs = list(zip(own, theirs, strict=True))
        row: Row = {
            "status": "ok",
            "loss_first": round(own[0], 5),
            "loss_last": round(own[-1], 5),
            "max_loss_difference": max(abs(a - b) for a, b in pairs),
            "compared_to": reference.name,
            "compared_steps": len(pairs),
        }
        unit = torch.finfo(torch.bfloat16).eps / 2
        if not all(map(math.isfinite, own)):
            return row | {"status": "wrong", "reason": "a loss is not finite"}
        if abs(own[0] - theirs[0]) > unit * abs(theirs[0]):
            reason = f"first loss {own[0]:.5f}, {reference.name} has {theirs[0]:.5f}"
            return row | {"status": "wrong", "reason": reason}
        return row

    def _memory_row(self, entry: _Entry) -> Row:
        assert entry.arm is not None
        assert entry.parking is not None
        row: Row = {
            "peak_gib": round((entry.peak_bytes + entry.arm.idle_bytes) / 2**30, 2),
            "kept_gib": round(entry.parking.nbytes / 2**30, 2),
            "parked_turns": entry.parking.turns,
            **entry.arm.notes,
        }
        predicted = entry.arm.notes.get("predicted_peak_gib")
        if predicted is not None:
            row["predicted_over_peak"] = round(predicted / row["peak_gib"], 4)
        return row

    def _drop(self, entry: _Entry, status: str, reason: str) -> None:
        entry.arm = entry.parking = None
        entry.row |= {"status": status, "reason": reason}
        self.say(f"  {entry.name}: {status} {reason}")


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _product_rate(device: torch.device) -> float:
    yardstick = Yardstick(device, torch.bfloat16)
    return yardstick.rates(interleaved(yardstick.calls(), device)).flops_per_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _collect(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
