"""Measures tile configurations of the expert kernels on this device and picks the fastest.

Every grouped product is timed alone with every candidate, in turns; candidates that do not fit the
device are skipped. The choice passes the correctness gate of the whole layer before it is written.
"""

import os
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import torch

from slipstream.bench.gate import judge, standard
from slipstream.bench.moe import run_layer
from slipstream.bench.moe_peers import slipstream_layer
from slipstream.bench.moe_problem import MoeShape, Problem, make_problem, plain_layer
from slipstream.bench.timing import Call, interleaved
from slipstream.errors import HardwareError
from slipstream.ops import triton_support
from slipstream.ops.moe.experts import tuned
from slipstream.ops.moe.experts.tuned import Rule, Tile

MAX_COMPILERS = 12
WORK = {"up": 4, "down": 2, "da": 2, "dx": 4, "dw13": 4, "dw2": 2}
"""FLOPs of a product over N*D*F."""


def _tile(block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int) -> Tile:
    return Tile(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        num_warps=num_warps,
        num_stages=num_stages,
    )


_ROWS = [
    _tile(128, 256, 64, 8, 3),
    _tile(128, 256, 64, 8, 4),
    _tile(128, 256, 128, 8, 2),
    _tile(128, 128, 64, 8, 3),
    _tile(128, 128, 64, 4, 4),
    _tile(64, 256, 64, 8, 4),
    _tile(64, 128, 64, 4, 4),
]
_OUTER = [
    _tile(128, 256, 64, 8, 3),
    _tile(128, 256, 64, 8, 4),
    _tile(256, 128, 64, 8, 3),
    _tile(128, 128, 64, 8, 3),
    _tile(128, 128, 64, 4, 4),
]
_FULL_PRECISION = [
    _tile(64, 64, 32, 4, 2),
    _tile(64, 64, 32, 4, 3),
    _tile(128, 64, 32, 4, 3),
    _tile(128, 128, 32, 8, 2),
]


def candidates(product: str, dtype: torch.dtype) -> list[Tile]:
    """Tiles worth measuring for ``product``."""
    if dtype == torch.float32:
        tiles = _FULL_PRECISION
    else:
        some = _OUTER if product.startswith("dw") else _ROWS
        flat = (False,) if product == "up" else (False, True)
        tiles = [replace(tile, flatten=one) for tile in some for one in flat]
        tiles += [replace(tile, programs_per_sm=2) for tile in some if tile.block_n == 128]
    if product != "da":
        return tiles
    # The rows of dout are there: dw2 wants them copied out.
    before = [replace(tile, gather_before=True) for tile in tiles]
    return before + [replace(tile, fuse=True) for tile in before]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """What to tune."""

    shapes: list[MoeShape]
    dtype: torch.dtype
    device: torch.device
    repetitions: int = 15
    compilers: int = MAX_COMPILERS
    """Processes that compile candidates ahead; 1: compile in this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The fastest tile of one product, beside what the library would have used."""

    shape: MoeShape
    product: str
    tile: Tile
    ms: float
    before_ms: float
    tried: int
    """Candidates that ran."""

    @property
    def tflop_per_s(self) -> float:
        """Rate with the new tile."""
        shape = self.shape
        flops = WORK[self.product] * shape.tokens * shape.top_k * shape.width * shape.hidden
        return flops / self.ms / 1e9


def tune_moe(request: TuneRequest, say: Callable[[str], None]) -> Generator[Tuned]:
    """Measure all candidates of all shapes; yields one result per product. HardwareError."""
    require_device(request)
    for shape in request.shapes:
        say(f"{shape.name}: compiling candidates")
        _compile_ahead(request, shape)
        problem = make_problem(shape, skew=0.0, dtype=request.dtype, device=request.device)
        best = _best(request, problem, say)
        with tuned.force(**{product: found.tile for product, found in best.items()}):
            _check(problem)
        yield from best.values()


def require_device(request: TuneRequest) -> None:
    """Raise HardwareError where the kernels cannot run."""
    refusal = triton_support.refusal(torch.empty(0, device=request.device, dtype=request.dtype))
    if refusal is not None:
        raise HardwareError(
            f"tune moe: nothing to tune on {request.device.type}: {refusal.reason}; "
            "run it on the GPU that will train"
        )


def rules(found: list[Tuned], dtype: torch.dtype, device: torch.device) -> list[Rule]:
    """Override rules: each measured bucket of rows per expert, the largest one without limit."""
    made: dict[tuple[str, int, int], list[tuple[int, Tile]]] = {}
    for one in found:
        rows = one.shape.tokens * one.shape.top_k // one.shape.experts
        bucket = 1 << max(0, rows - 1).bit_length()
        key = (one.product, one.shape.width, one.shape.hidden)
        made.setdefault(key, []).append((bucket, one.tile))
    result = []
    for (product, width, hidden), tiles in made.items():
        by_size = sorted(dict(tiles).items())
        for index, (bucket, tile) in enumerate(by_size):
            last = index == len(by_size) - 1
            result.append(
                Rule(
                    product=product,
                    capability=tuned.capability_of(device),
                    max_rows_per_expert=float("inf") if last else bucket,
                    tile=tile,
                    dtype=str(dtype).removeprefix("torch."),
                    width=width,
                    hidden=hidden,
                )
            )
    return result


def _best(request: TuneRequest, problem: Problem, say: Callable[[str], None]) -> dict[str, Tuned]:
    # Triton is optional: only reached where it is installed.
    from slipstream.bench.moe_products import Products  # noqa: PLC0415

    products = Products(problem)
    best: dict[str, Tuned] = {}
    for name in tuned.PRODUCTS:
        calls: dict[Tile, Call] = {}
        standing = _standing(problem, name)
        for tile in dict.fromkeys((standing, *candidates(name, request.dtype))):
            call = products.call(name, tile)
            if _runs(call):
                calls[tile] = call
        times = _time({str(i): call for i, call in enumerate(calls.values())}, request)
        measured = dict(zip(calls, times.values(), strict=True))
        say(f"  {name}: {len(calls)} tiles, {min(times.values()):.3f} ms")
        tile = min(measured, key=measured.__getitem__)
        best[name] = Tuned(
            shape=problem.shape,
            product=name,
            tile=tile,
            ms=measured[tile],
            before_ms=measured.get(standing, float("nan")),
            tried=len(measured),
        )
    return best


def _standing(problem: Problem, product: str) -> Tile:
    rows = problem.shape.tokens * problem.shape.top_k
    return tuned.lookup(product, problem.device, problem.dtype, rows, problem.leaves["w2"])


def _time(calls: dict[str, Call], request: TuneRequest) -> dict[str, float]:
    timings = interleaved(calls, request.device, warmup=2, repetitions=request.repetitions)
    return {name: timing.device_ms.median for name, timing in timings.items()}


def _runs(call: Call) -> bool:
    try:
        call()
    # What the compiler says of a tile that does not fit differs by version and device.
    except Exception:
        return False
    return True


def _check(problem: Problem) -> None:
    layer = slipstream_layer(problem)
    against = standard(lambda dtype: plain_layer(problem, dtype), problem.dtype)
    verdict = judge(lambda: run_layer(layer, problem.dout_TD), against, problem.dtype)
    if verdict.problems:
        raise HardwareError(
            f"tune moe: the fastest tiles are wrong on this device: {'; '.join(verdict.problems)}; "
            "nothing was written; please report it with the output of slipstream env"
        )


def _compile_ahead(request: TuneRequest, shape: MoeShape) -> None:
    workers = min(request.compilers, os.cpu_count() or 1)
    if request.device.type != "cuda" or workers < 2:
        return
    jobs = [(request, shape, n, t) for n in tuned.PRODUCTS for t in candidates(n, request.dtype)]
    shares = [jobs[start::workers] for start in range(workers)]
    # Compiled kernels go to Triton's cache on disk, where this process finds them.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, shares))


def _compile(jobs: list[tuple[TuneRequest, MoeShape, str, Tile]]) -> None:
    from slipstream.bench.moe_products import Products  # noqa: PLC0415

    request, shape = jobs[0][:2]
    few = replace(shape, tokens=min(shape.tokens, 1024))
    problem = make_problem(few, skew=0.0, dtype=request.dtype, device=request.device)
    products = Products(problem)
    for _, _, name, tile in jobs:
        _runs(products.call(name, tile))
