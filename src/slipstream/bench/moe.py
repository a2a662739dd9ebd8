"""One MoE layer, forward and backward, of all peers side by side: gate, time, profile, memory.

A peer that is absent, fails, or misses the correctness gate is a row that says so, without figures.
"""

import gc
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.bench.environment import environment
from slipstream.bench.first_call import measure_first_call
from slipstream.bench.gate import Standard, Verdict, judge, standard
from slipstream.bench.kernels import kernel_ms, share_not_gemm
from slipstream.bench.memory import measure_memory
from slipstream.bench.moe_peers import Layer, Peer
from slipstream.bench.moe_problem import (
    MoeShape,
    Problem,
    make_problem,
    named_results,
    plain_dense,
    plain_layer,
)
from slipstream.bench.results import Row
from slipstream.bench.timing import Quantiles, Timing, graphed, interleaved
from slipstream.errors import HardwareError
from slipstream.ops import dispatch
from slipstream.verify.budget import Results

KEPT_KERNELS = 40
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeRequest:
    """What to measure."""

    shapes: list[MoeShape]
    skews: list[float]
    peers: list[Peer]
    dtype: torch.dtype
    device: torch.device
    warmup: int = 5
    """Untimed turns of all variants, after the gate has compiled and tuned them."""
    repetitions: int = 30
    """Timed turns."""
    cold: bool = False
    """Also time the first call in a fresh process with empty compiler caches."""
    cold_limit_s: float = 300.0
    """Longest to wait for that."""
    graph: bool = False
    """Also time forward and backward as one CUDA graph."""


@dataclass(slots=True, kw_only=True)
class _Entry:
    """A peer on one problem."""

    peer: Peer
    row: Row
    layer: Layer | None = None
    variants: dict[str, Callable[[], object]] = field(default_factory=dict)


def bench_moe(request: MoeRequest, say: Say) -> Generator[Row]:
    """Measure every shape at every skew; yields one row per peer. ``say`` gets progress."""
    where = environment(request.device)
    for shape in request.shapes:
        for skew in request.skews:
            say(f"{shape.name}, skew {skew:g}")
            yield from _bench_one(request, shape, skew, where, say)
            torch.compiler.reset()
            _collect(request.device)


def _bench_one(
    request: MoeRequest, shape: MoeShape, skew: float, where: dict[str, Any], say: Say
) -> Generator[Row]:
    problem = make_problem(shape, skew=skew, dtype=request.dtype, device=request.device)
    entries = [
        _Entry(peer=peer, row=_head(request, problem, peer) | where) for peer in request.peers
    ]
    _gate(entries, problem, say)
    _collect(request.device)
    running = [entry for entry in entries if entry.layer is not None]
    for entry in running:
        _prepare(entry, problem, request.graph)
    variants = {
        f"{entry.peer.name} {name}": call
        for entry in running
        for name, call in entry.variants.items()
    }
    say(f"  timing {len(variants)} variants")
    timings = interleaved(
        variants, request.device, warmup=request.warmup, repetitions=request.repetitions
    )
    for entry in entries:
        if entry.layer is not None:
            own = {name: timings[f"{entry.peer.name} {name}"] for name in entry.variants}
            entry.row |= _figures(own, shape) | _device_figures(entry.layer, problem)
            if request.cold:
                say(f"  first call of {entry.peer.name}")
                entry.row |= measure_first_call(
                    entry.peer.name,
                    shape,
                    skew=skew,
                    dtype=request.dtype,
                    device=request.device,
                    limit_s=request.cold_limit_s,
                )
        yield entry.row


def _head(request: MoeRequest, problem: Problem, peer: Peer) -> Row:
    return {
        "case": "moe",
        **shape_row(problem),
        "max_over_mean_load": round(problem.max_over_mean, 3),
        "peer": peer.name,
        "peer_version": peer.version(),
        "settings": peer.chosen_settings(),
        "warmup": request.warmup,
    }


def shape_row(problem: Problem) -> Row:
    """What was run, as part of a row."""
    shape = problem.shape
    return {
        "shape": shape.name,
        "tokens": shape.tokens,
        "width": shape.width,
        "hidden": shape.hidden,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "skew": problem.skew,
        "dtype": str(problem.dtype).removeprefix("torch."),
    }


def _gate(entries: list[_Entry], problem: Problem, say: Say) -> None:
    moe_standard: Standard | None = None
    for entry in entries:
        reason = entry.peer.absent(problem.device)
        if reason is not None:
            entry.row |= {"status": "absent", "reason": reason}
        elif entry.peer.dense:
            _run_gate(entry, problem, None)
        else:
            if moe_standard is None:
                moe_standard = _moe_standard(problem)
            _run_gate(entry, problem, moe_standard)
        say(f"  {entry.peer.name}: {entry.row['status']} {entry.row.get('reason', '')}".rstrip())


def _moe_standard(problem: Problem) -> Standard:
    try:
        return standard(lambda dtype: plain_layer(problem, dtype), problem.dtype)
    except torch.OutOfMemoryError:
        raise HardwareError(
            f"bench moe: the truth of shape {problem.shape.name} in fp64 does not fit the device's "
            "memory; take a shape with fewer tokens or experts"
        ) from None


def _run_gate(entry: _Entry, problem: Problem, against: Standard | None) -> None:
    before = dispatch.counts()
    try:
        layer = entry.peer.build(problem)
        if against is None:
            against = standard(
                lambda t: plain_dense(layer.leaves, problem.dout_TD, t), problem.dtype
            )
        verdict = judge(
            lambda: layer.restore(run_layer(layer, problem.dout_TD)), against, problem.dtype
        )
    # Whatever a peer raises, the others are still measured.
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        entry.row |= {"status": "failed", "reason": f"{type(error).__name__}: {text}"}
        _collect(problem.device)
        return
    entry.row |= _verdict_row(verdict)
    used = [
        f"{op}={name}"
        for (op, name), n in dispatch.counts().items()
        if n > before.get((op, name), 0)
    ]
    if used:
        entry.row["implementations"] = sorted(used)
    if not verdict.problems:
        entry.layer = layer


def _verdict_row(verdict: Verdict) -> Row:
    row: Row = {
        "status": "wrong" if verdict.problems else "ok",
        "error": {name: float(f"{error:.3g}") for name, error in verdict.errors.items()},
    }
    if verdict.problems:
        return row | {"reason": "; ".join(verdict.problems)}
    return row | {"bitwise": verdict.bitwise}


def run_layer(layer: Layer, dout_TD: torch.Tensor) -> Results:
    """Output and gradients of one forward and backward."""
    out_TD = layer.forward()
    grads = torch.autograd.grad(out_TD, list(layer.leaves.values()), dout_TD)
    return named_results(out_TD, dict(zip(layer.leaves, grads, strict=True)))


def _prepare(entry: _Entry, problem: Problem, graph: bool) -> None:
    layer = entry.layer
    assert layer is not None

    def total() -> Results:
        return run_layer(layer, problem.dout_TD)

    entry.variants = {"forward": layer.forward, "total": total}
    if not graph or problem.device.type != "cuda":
        return
    try:
        entry.variants["graph"] = graphed(total, problem.device)
    # A peer that synchronises cannot be captured, and raises what it likes.
    except Exception as error:
        entry.row["graph_failed"] = f"{type(error).__name__}: {error}"[:300]


def _figures(timings: dict[str, Timing], shape: MoeShape) -> Row:
    forward, total = timings["forward"], timings["total"]
    row = {
        "n": total.device_ms.n,
        "forward_ms": forward.device_ms.row(),
        "backward_ms": {"median": round(total.device_ms.median - forward.device_ms.median, 4)},
        "total_ms": total.device_ms.row(),
        "forward_host_ms": forward.host_ms.row(),
        "total_host_ms": total.host_ms.row(),
        "forward_tflop_per_s": _rate(shape.flops / 3, forward.device_ms),
        "total_tflop_per_s": _rate(shape.flops, total.device_ms),
    }
    if "graph" in timings:
        row["graph_ms"] = timings["graph"].device_ms.row()
    return row


def _rate(flops: float, time_ms: Quantiles) -> float:
    return float(f"{flops / time_ms.median / 1e9:.4g}")


def _device_figures(layer: Layer, problem: Problem) -> Row:
    if problem.device.type != "cuda":
        return {}
    memory = measure_memory(layer, problem.dout_TD)
    kernels = kernel_ms(lambda: run_layer(layer, problem.dout_TD), problem.device)
    kept = list(kernels.items())[:KEPT_KERNELS]
    return {
        "saved_mib": round(memory.saved_bytes / 2**20, 1),
        "peak_mib": round(memory.peak_bytes / 2**20, 1),
        "share_not_gemm": round(share_not_gemm(kernels), 4),
        "kernels_ms": {name[:120]: round(ms, 4) for name, ms in kept},
    }


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
