"""What load balancing inside routing costs where nothing is hot, and gains where something is.

Routing alone on balanced logits, then the whole layer on Zipf loads, off and in each mode, with the
smoothed load at what the router asks for, as after many steps of it.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, get_args

import torch

from slipstream.bench.environment import environment
from slipstream.bench.moe import run_layer, shape_row
from slipstream.bench.moe_peers import slipstream_layer
from slipstream.bench.moe_problem import MoeShape, Problem, make_problem
from slipstream.bench.results import Row
from slipstream.bench.timing import Call, interleaved
from slipstream.ops import moe
from slipstream.ops.moe.route import BalanceMode

THRESHOLD = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceRequest:
    """What to measure."""

    shapes: list[MoeShape]
    skews: list[float]
    """Zipf exponents of the loads that are balanced."""
    dtype: torch.dtype
    device: torch.device
    warmup: int = 5
    repetitions: int = 30
    threshold: float = THRESHOLD


def bench_balance(request: BalanceRequest, say: Callable[[str], None]) -> Generator[Row]:
    """Measure every shape; yields rows of routing, then of the layer per skew, off and on."""
    where = environment(request.device)
    for shape in request.shapes:
        say(f"{shape.name}: routing")
        yield from _measure(request, shape, 0.0, _route_calls, where)
        for skew in request.skews:
            say(f"{shape.name}: layer at skew {skew:g}")
            yield from _measure(request, shape, skew, _layer_calls, where)


def _measure(
    request: BalanceRequest,
    shape: MoeShape,
    skew: float,
    calls_of: Callable[[Problem, dict[str, Any]], dict[str, Call]],
    where: dict[str, Any],
) -> Generator[Row]:
    problem = make_problem(shape, skew=skew, dtype=request.dtype, device=request.device)
    threshold = torch.full((), request.threshold, device=problem.device)
    on = {"load_E": problem.load_E.float(), "threshold": threshold}
    settings: dict[str, dict[str, Any]] = {
        "off": {},
        **{mode: on | {"mode": mode} for mode in get_args(BalanceMode)},
    }
    calls = {
        f"{state} {name}": call
        for state, balance in settings.items()
        for name, call in calls_of(problem, balance).items()
    }
    timings = interleaved(
        calls, request.device, warmup=request.warmup, repetitions=request.repetitions
    )
    for state, balance in settings.items():
        row = {"case": "moe-balance", **shape_row(problem), "balance": state}
        row |= {"measured": "layer" if skew else "routing", "threshold": request.threshold}
        row |= _routing_row(problem, balance, skew) | {"warmup": request.warmup}
        if row["status"] == "ok":
            forward, total = (timings[f"{state} {name}"] for name in ("forward", "total"))
            row |= {
                "n": total.device_ms.n,
                "forward_ms": forward.device_ms.row(),
                "total_ms": total.device_ms.row(),
                "total_host_ms": total.host_ms.row(),
            }
        yield row | where


def _route_calls(problem: Problem, balance: dict[str, Any]) -> dict[str, Call]:
    x_TD, router_ED, *_ = (leaf.detach() for leaf in problem.leaves.values())
    logits_TE = moe.router_logits(x_TD, router_ED).requires_grad_()
    top_k = problem.shape.top_k
    dweight_TK = torch.randn(problem.shape.tokens, top_k, device=problem.device)

    def forward() -> torch.Tensor:
        return moe.route(logits_TE, top_k=top_k, normalize=True, **balance).weight_TK

    def total() -> object:
        return torch.autograd.grad(forward(), logits_TE, dweight_TK)

    return {"forward": forward, "total": total}


def _layer_calls(problem: Problem, balance: dict[str, Any]) -> dict[str, Call]:
    layer = slipstream_layer(problem, **balance)
    return {"forward": layer.forward, "total": lambda: run_layer(layer, problem.dout_TD)}


def _routing_row(problem: Problem, balance: dict[str, Any], skew: float) -> Row:
    """Load and moved slots, and the gate: nothing dropped, no expert twice, or plain top-k."""
    shape = problem.shape
    logits_TE = moe.router_logits(problem.leaves["x"].detach(), problem.leaves["router"].detach())
    plain = moe.route(logits_TE, top_k=shape.top_k, normalize=True)
    routing = moe.route(logits_TE, top_k=shape.top_k, normalize=True, **balance)
    counts_E = routing.counts_E.double()
    row: Row = {
        "status": "ok",
        "max_over_mean_load": round((counts_E.max() / counts_E.mean()).item(), 3),
        "rerouted_share": round(routing.rerouted.item() / routing.expert_TK.numel(), 4),
    }
    experts_TK = routing.expert_TK.sort(dim=1)[0]
    twice = bool((experts_TK[:, 1:] == experts_TK[:, :-1]).any())
    problems = {
        "slots were dropped": int(counts_E.sum()) != shape.tokens * shape.top_k,
        "a token has an expert twice": twice,
        "nothing is hot, yet choices changed": not skew
        and not torch.equal(routing.expert_TK, plain.expert_TK),
    }
    found = [text for text, wrong in problems.items() if wrong]
    return row | {"status": "wrong", "reason": "; ".join(found)} if found else row
