"""Every op beside its peers: gate, device and host time, share of the copy rate of the same run.

A peer that is absent, fails, or misses the correctness gate is a row that says so, without figures.
The copy (and matrix product) that shares are taken of is one more variant in the same turns.
"""

import gc
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.bench.environment import environment
from slipstream.bench.gate import Standard, judge
from slipstream.bench.kernels import kernel_ms
from slipstream.bench.ops_case import Missing, OpCase, OpShape
from slipstream.bench.ops_figures import Rates, figures, reemission_row
from slipstream.bench.ops_list import OPS, shapes_of
from slipstream.bench.ops_peers import peer_version
from slipstream.bench.ops_run import Runner, Tensors, measure_memory
from slipstream.bench.results import Row
from slipstream.bench.timing import Call, Timing, graphed, interleaved
from slipstream.ops import dispatch

KEPT_KERNELS = 12
COPY_BYTES = {"cuda": 2**30, "cpu": 2**22}
"""Many times any cache of a GPU; a CPU's is for trying things out."""
PRODUCT = {"cuda": 8192, "cpu": 128}
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsRequest:
    """What to measure."""

    ops: list[str]
    shapes: list[OpShape]
    """Instead of each op's own; empty: those."""
    peers: list[str]
    dtype: torch.dtype
    device: torch.device
    quick: bool = False
    """One shape of each op."""
    warmup: int = 5
    """Untimed turns of all variants, after the gate has compiled them."""
    repetitions: int = 30
    """Timed turns."""
    graph: bool = False
    """Also time forward and backward as one CUDA graph."""
    kernels: bool = False
    """Also the device time by kernel."""


@dataclass(slots=True, kw_only=True)
class _Entry:
    peer: str
    row: Row
    runner: Runner | None = None


def bench_ops(request: OpsRequest, say: Say) -> Generator[Row]:
    """Measure every op at every shape; yields one row per peer. ``say`` gets progress."""
    where = environment(request.device)
    yardstick = Yardstick(request.device, request.dtype)
    for op in request.ops:
        for shape in shapes_of(op, request.shapes, quick=request.quick):
            case = OPS[op].make(shape, request.dtype.itemsize)
            say(f"{op} {case.label}")
            yield from bench_case(request, case, yardstick, where, say)
            torch.compiler.reset()
            _collect(request.device)


class Yardstick:
    """A large copy and a large matrix product, to take shares of."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        size = COPY_BYTES[device.type]
        self.source = torch.ones(size, dtype=torch.uint8, device=device)
        self.target = torch.empty_like(self.source)
        side = PRODUCT[device.type]
        self.left = torch.randn(side, side, device=device, dtype=dtype)

    def calls(self) -> dict[str, Call]:
        """The variants to time."""
        return {
            "copy": lambda: self.target.copy_(self.source),
            "product": lambda: self.left @ self.left,
        }

    def rates(self, timings: dict[str, Timing]) -> Rates:
        """Bytes and FLOPs per second of the two.

        The copy's are those of its fastest tenth: on an H200 some copies take a tenth longer, and
        where these are most of one case no share of their rate says anything.
        """
        copy_s = timings["copy"].device_ms.p10 / 1e3
        product_s = timings["product"].device_ms.median / 1e3
        # A copy reads every byte and writes it.
        return Rates(
            bytes_per_s=2 * self.source.nbytes / copy_s,
            flops_per_s=2.0 * len(self.left) ** 3 / product_s,
        )


def bench_case(
    request: OpsRequest, case: OpCase, yardstick: Yardstick, where: dict[str, Any], say: Say
) -> Generator[Row]:
    """Gate, then time every peer of one case."""
    tensors = Tensors(case, request.dtype, request.device)
    names = [name for name in request.peers if name in case.peers]
    entries = [_Entry(peer=name, row=_head(request, case, name) | where) for name in names]
    _gate(entries, tensors, say)
    _collect(request.device)
    running = {entry.peer: entry for entry in entries if entry.runner is not None}
    calls, before = yardstick.calls(), {}
    for name, entry in running.items():
        for variant, (call, prepare) in _variants(entry, request).items():
            calls[f"{name} {variant}"], before[f"{name} {variant}"] = call, prepare
    timings = interleaved(
        calls,
        request.device,
        warmup=request.warmup,
        repetitions=request.repetitions,
        before=before,
    )
    rates = yardstick.rates(timings)
    for name, entry in running.items():
        own = {
            key.removeprefix(f"{name} "): timing
            for key, timing in timings.items()
            if key.startswith(f"{name} ")
        }
        entry.row |= figures(case, own, rates, request.device)
        entry.row |= _device_figures(entry, request)
    if case.reemission is not None:
        reemits, keeps = (running.get(n) for n in (case.reemission.peer, case.reemission.keeps))
        if reemits is not None and keeps is not None:
            reemits.row |= reemission_row(case.reemission, reemits.row, keeps.row, rates)
    yield from (entry.row for entry in entries)


def _head(request: OpsRequest, case: OpCase, peer: str) -> Row:
    return {
        "case": "ops",
        "op": case.op,
        "shape": case.label,
        "sizes": case.sizes,
        "dtype": str(request.dtype).removeprefix("torch."),
        "peer": peer,
        "peer_version": peer_version(peer),
        "warmup": request.warmup,
    }


def _gate(entries: list[_Entry], tensors: Tensors, say: Say) -> None:
    case, against = tensors.case, None
    for entry in entries:
        try:
            function = case.peers[entry.peer]()
        except Missing as missing:
            entry.row |= {"status": "absent", "reason": str(missing)}
        # What a peer raises when it is imported is its own affair.
        except Exception as error:
            entry.row |= _failure(error)
        else:
            if against is None:
                against = _standard(tensors)
            _run_gate(entry, Runner(function=function, tensors=tensors), against)
        say(f"  {entry.peer}: {entry.row['status']} {entry.row.get('reason', '')}".rstrip())


def _standard(tensors: Tensors) -> Standard:
    case = tensors.case
    truth = tensors.evaluate(case.truth or case.plain, torch.float64)
    return Standard(truth=truth, eager=tensors.evaluate(case.plain))


def _run_gate(entry: _Entry, runner: Runner, against: Standard) -> None:
    tensors, before = runner.tensors, dispatch.counts()
    unit = None if tensors.case.own_units else _dtype_of(entry.row)
    try:
        verdict = judge(lambda: tensors.evaluate(runner.function), against, unit)
    # Whatever a peer raises, the others are still measured.
    except Exception as error:
        entry.row |= _failure(error)
        return
    entry.row["error"] = {n: float(f"{error:.3g}") for n, error in verdict.errors.items()}
    used = [f"{op}={n}" for (op, n), k in dispatch.counts().items() if k > before.get((op, n), 0)]
    if used:
        entry.row["implementations"] = sorted(used)
    if verdict.problems:
        entry.row |= {"status": "wrong", "reason": "; ".join(verdict.problems)}
        return
    entry.row |= {"status": "ok", "bitwise": verdict.bitwise}
    entry.runner = runner


def _failure(error: Exception) -> Row:
    text = " ".join(str(error).split())[:300]
    return {"status": "failed", "reason": f"{type(error).__name__}: {text}"}


def _dtype_of(row: Row) -> torch.dtype:
    return getattr(torch, row["dtype"])


def _variants(entry: _Entry, request: OpsRequest) -> dict[str, tuple[Call, Call]]:
    runner = entry.runner
    assert runner is not None
    found = runner.variants()
    if request.graph and request.device.type == "cuda":
        try:
            replay = graphed(runner.total, request.device)
            found["graph"] = (replay, runner.tensors.restore)
        # A peer that synchronises cannot be captured, and raises what it likes.
        except Exception as error:
            entry.row["graph_failed"] = f"{type(error).__name__}: {error}"[:300]
    return found


def _device_figures(entry: _Entry, request: OpsRequest) -> Row:
    runner = entry.runner
    if request.device.type != "cuda" or runner is None:
        return {}
    memory = measure_memory(runner, request.device)
    row: Row = {
        "saved_mib": round(memory.saved_bytes / 2**20, 2),
        "peak_mib": round(memory.peak_bytes / 2**20, 2),
    }
    if request.kernels:
        found = kernel_ms(runner.total, request.device)
        kept = list(found.items())[:KEPT_KERNELS]
        row["kernels_ms"] = {name[:120]: round(ms, 4) for name, ms in kept}
    return row


def _collect(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
