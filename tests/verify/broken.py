"""Wrong implementations of ops, for a while in dispatch: what ``slipstream verify`` must catch."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from slipstream.ops import dispatch
from slipstream.ops.dispatch import Implementation, Refusal
from slipstream.ops.moe.combine.reference import combine_reference
from slipstream.ops.moe.experts.reference import experts_reference
from slipstream.ops.moe.grouped_gemm.reference import grouped_gemm_reference
from slipstream.ops.moe.route.reference import route_reference
from slipstream.ops.norm.reference import norm_reference
from slipstream.ops.rope.reference import rope_reference
from slipstream.verify import Options, Outcome, Row, verify


@contextmanager
def served_by(
    op: str, run: Callable[..., Any], refuse: Callable[..., Refusal | None] | None = None
) -> Iterator[None]:
    """Within the block ``op`` has the implementation ``broken`` alone.

    The eager code of routing is its reference, which then stays behind it.
    """
    before = dispatch._OPS[op]
    broken = Implementation(name="broken", run=run, refuse=refuse or (lambda *_, **__: None))
    kept = [i for i in before.implementations if (op, i.name) == ("moe_route", "reference")]
    dispatch._OPS[op] = dataclasses.replace(before, implementations=[broken, *kept])
    try:
        yield
    finally:
        dispatch._OPS[op] = before


def failures(
    op: str,
    run: Callable[..., Any],
    dtype: str = "fp32",
    *,
    quick: bool = True,
    device: str = "cpu",
) -> list[Outcome]:
    """What a verification of ``op`` finds wrong with ``run``."""
    with served_by(op, run):
        options = Options(only=(op,), device=device, dtypes=(dtype,), quick=quick)
        row = row_of(verify(options), op, "broken")
    assert row.verdict == ("fail" if any(o.verdict == "fail" for o in row.outcomes) else "pass")
    return [outcome for outcome in row.outcomes if outcome.verdict == "fail"]


def row_of(rows: list[Row], op: str, implementation: str) -> Row:
    """The only row of that implementation."""
    (row,) = [row for row in rows if (row.op, row.implementation) == (op, implementation)]
    return row


class _Scaled(torch.autograd.Function):
    """The identity, with a gradient that is off."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def wrong_gradient(x, *rest):
    return norm_reference(_Scaled.apply(x, 1 + 2**-10), *rest)


def gradient_of_ones(x, *rest):
    """Right values; the gradient forgets that the norm depends on its input's scale."""
    y, s = norm_reference(x, *rest)
    return y.detach() + s - s.detach() + 0 * y, s


def one_element_off(x, *rest):
    """A few roundings more in one element than anywhere else, in every call."""
    y, s = norm_reference(x, *rest)
    off = torch.zeros_like(y)
    if y.numel():
        off[(0,) * y.dim()] = 8e-6
    return y + off, s


def nan_for_a_single_token(x, *rest):
    y, s = norm_reference(x, *rest)
    return (y * float("nan") if len(x) == 1 else y), s


def as_if_contiguous(x, *rest):
    """Reads memory in storage order, whatever the strides."""
    dense = torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride())
    return norm_reference(dense, *rest)


def last_row_unwritten(q, k, cos, sin):
    turned_q, turned_k = rope_reference(q, k, cos, sin)
    out = torch.empty_like(turned_q)
    out[:, :-1] = turned_q[:, :-1]
    out[:, -1:] += 0 * turned_q[:, -1:]
    return out, turned_k


def any_order(y_ND, routing, residual_TD, shared_TD):
    """Sums the slots of a token in an order that changes from run to run, as atomics do."""
    wide = torch.promote_types(y_ND.dtype, torch.float32)
    present_N = (routing.position_N < routing.offsets_E1[-1])[:, None]
    rows_ND = torch.where(present_N, y_ND[routing.position_N].to(wide), 0)
    slots = rows_ND.view(*routing.expert_TK.shape, y_ND.shape[1])
    terms = list((slots * routing.weight_TK.to(wide)[:, :, None]).unbind(1))
    terms += [extra.to(wide) for extra in (residual_TD, shared_TD) if extra is not None]
    total = torch.zeros_like(terms[0])
    for i in torch.randperm(len(terms)).tolist():
        total = total + terms[i]
    return total.to(y_ND.dtype)


def narrow_sum(y_ND, routing, residual_TD, shared_TD):
    """Adds up in the dtype of the rows instead of fp32."""
    present_N = (routing.position_N < routing.offsets_E1[-1])[:, None]
    rows_ND = torch.where(present_N, y_ND[routing.position_N], 0)
    slots = rows_ND.view(*routing.expert_TK.shape, y_ND.shape[1])
    total = torch.zeros_like(slots[:, 0])
    for slot, weight in zip(slots.unbind(1), routing.weight_TK.unbind(1), strict=True):
        total = total + slot * weight[:, None].to(slot.dtype)
    for extra in (shared_TD, residual_TD):
        total = total if extra is None else total + extra
    return total


def reads_absent_rows(y_ND, routing, residual_TD, shared_TD):
    everything = routing._replace(
        offsets_E1=routing.offsets_E1.clone().index_fill_(
            0, torch.tensor(routing.offsets_E1.numel() - 1), routing.order_N.numel()
        )
    )
    return combine_reference(y_ND, everything, residual_TD, shared_TD)


def prefers_later_experts(logits_TE, *rest):
    """Breaks ties the other way round."""
    nudge = torch.arange(logits_TE.shape[1]) * 2.0**-22
    return route_reference(logits_TE.float() + nudge, *rest)


def balance_touches_the_weights(logits_TE, bias_E, load_E, threshold, *rest):
    routing = route_reference(logits_TE, bias_E, load_E, threshold, *rest)
    if threshold is None:
        return routing
    return routing._replace(weight_TK=routing.weight_TK * (1 + 2**-23))


def miscounts(logits_TE, *rest):
    routing = route_reference(logits_TE, *rest)
    return routing._replace(demand_E=routing.demand_E + (len(logits_TE) == 63))


def writes_past_the_end(x_ND, w_EPD, offsets_E1):
    return grouped_gemm_reference(x_ND, w_EPD, offsets_E1) + x_ND.new_ones(()) * (
        torch.arange(len(x_ND)) >= offsets_E1[-1]
    ).to(x_ND.dtype).unsqueeze(1)


def reads_past_the_end(x_ND, w_EPD, offsets_E1):
    """The last group takes the rows of nobody, too."""
    ends = offsets_E1.clone()
    ends[-1] = len(x_ND)
    return grouped_gemm_reference(x_ND, w_EPD, ends)


def gradient_for_empty_experts(x_TD, w13_EPD, w2_EDF, *rest, **_):
    y_ND = experts_reference(x_TD, w13_EPD, w2_EDF, *rest)
    leak = w2_EDF.sum(dim=0).sum() * 1e-12
    return y_ND + (leak - leak.detach())


def breaks_the_graph(x, *rest):
    torch._dynamo.graph_break()
    return norm_reference(x, *rest)


def refuses(reason: str) -> Callable[..., Refusal]:
    """A refuse function that serves nothing."""
    return lambda *_, **__: Refusal(reason=reason)


def raises(*_):
    raise RuntimeError("out of tiles")
