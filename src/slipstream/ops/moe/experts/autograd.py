"""The expert MLPs as grouped matrix products, forward and backward, any token counts.

Saved for backward: ``x`` and the pre-activation ``h`` (or ``x`` alone); the activation is computed
again from ``h`` and the gathered rows again from ``x``. No atomics: the gradient of ``x`` is a
gather and a sum in fixed order, that of a bias a product with ones. Derivation in README.md.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from slipstream.ops.activation.backward import activation_backward
from slipstream.ops.activation.reference import activation_reference
from slipstream.ops.check import compute_dtype
from slipstream.ops.moe.experts.grouped import (
    ALIGN_BYTES,
    grouped_outer,
    grouped_rows,
    grouped_sum,
)
from slipstream.ops.moe.experts.options import ExpertsOptions
from slipstream.ops.moe.routing import Routing


def experts_grouped(
    x_TD: torch.Tensor,
    w13_EPD: torch.Tensor,
    w2_EDF: torch.Tensor,
    b13_EP: torch.Tensor | None,
    b2_ED: torch.Tensor | None,
    routing: Routing,
    options: ExpertsOptions,
) -> torch.Tensor:
    """Same rows as the reference; widths that are not aligned are padded with zeros."""
    width = x_TD.shape[1]
    w13_EPD, w2_EDF = w13_EPD.to(x_TD.dtype), w2_EDF.to(x_TD.dtype)
    step = ALIGN_BYTES // x_TD.element_size()
    pad_d, pad_f = -width % step, -w2_EDF.shape[2] % step
    if pad_d or pad_f:
        x_TD = F.pad(x_TD, (0, pad_d))
        w13_EPD = _pad_hidden(F.pad(w13_EPD, (0, pad_d)), pad_f, options)
        w2_EDF = F.pad(w2_EDF, (0, pad_f, 0, pad_d))
        if b13_EP is not None:
            b13_EP = _pad_hidden(b13_EP[:, :, None], pad_f, options)[:, :, 0]
        if b2_ED is not None:
            b2_ED = F.pad(b2_ED, (0, pad_d))
    y_ND = _Experts.apply(x_TD.contiguous(), w13_EPD, w2_EDF, b13_EP, b2_ED, routing, options)
    return y_ND[:, :width] if pad_d else y_ND


def _pad_hidden(w13_EPD: torch.Tensor, pad_f: int, options: ExpertsOptions) -> torch.Tensor:
    """Zero rows for hidden units that are not there: at the end of gates and of ups."""
    if not options.gated or options.interleaved:
        return F.pad(w13_EPD, (0, 0, 0, pad_f * (2 if options.gated else 1)))
    halves = w13_EPD.reshape(len(w13_EPD), 2, -1, w13_EPD.shape[2])
    return F.pad(halves, (0, 0, 0, pad_f)).flatten(1, 2)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        w13_EPD: torch.Tensor,
        w2_EDF: torch.Tensor,
        b13_EP: torch.Tensor | None,
        b2_ED: torch.Tensor | None,
        routing: Routing,
        options: ExpertsOptions,
    ) -> torch.Tensor:
        ends = routing.offsets_E1[1:].to(torch.int32)
        h_NP = _up(x_TD, w13_EPD, b13_EP, ends, routing.order_N, routing.top_k)
        y_ND = grouped_rows(_activate(h_NP, options), w2_EDF.mT, ends)
        ctx.save_for_backward(
            x_TD,
            h_NP if options.save == "h" else None,
            w13_EPD,
            w2_EDF,
            b13_EP,
            ends,
            routing.order_N,
            routing.position_N,
        )
        ctx.options, ctx.top_k = options, routing.top_k
        ctx.bias_dtype = None if b2_ED is None else b2_ED.dtype
        return y_ND if b2_ED is None else _add_bias(y_ND, b2_ED, ends)

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (dy_ND,) = grads
        x_TD, h_NP, w13_EPD, w2_EDF, b13_EP, ends, order_N, position_N = ctx.saved_tensors
        options, top_k, needed = ctx.options, ctx.top_k, ctx.needs_input_grad
        if h_NP is None:
            h_NP = _up(x_TD, w13_EPD, b13_EP, ends, order_N, top_k)
        dx_TD = dw13_EPD = dw2_EDF = db13_EP = db2_ED = None
        dy_ND = dy_ND.contiguous()
        if needed[2]:
            dw2_EDF = grouped_outer(dy_ND, _activate(h_NP, options), ends)
        if needed[4]:
            db2_ED = grouped_sum(dy_ND, ends).to(ctx.bias_dtype)
        dh_NP = _activate_backward(h_NP, grouped_rows(dy_ND, w2_EDF, ends), options)
        if needed[1]:
            dw13_EPD = grouped_outer(dh_NP, x_TD.index_select(0, order_N // top_k), ends)
        if needed[3]:
            db13_EP = grouped_sum(dh_NP, ends).to(b13_EP.dtype)
        if needed[0]:
            drows_ND = grouped_rows(dh_NP, w13_EPD, ends)
            dx_TD = _gather_sum(drows_ND, position_N.view(-1, top_k), ends)
        return dx_TD, dw13_EPD, dw2_EDF, db13_EP, db2_ED, None, None


def _up(
    x_TD: torch.Tensor,
    w13_EPD: torch.Tensor,
    b13_EP: torch.Tensor | None,
    ends_E: torch.Tensor,
    order_N: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """The pre-activation ``(N, P)`` of the gathered rows."""
    h_NP = grouped_rows(x_TD.index_select(0, order_N // top_k), w13_EPD.mT, ends_E)
    return h_NP if b13_EP is None else _add_bias(h_NP, b13_EP, ends_E)


def _add_bias(rows_NA: torch.Tensor, bias_EA: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(len(rows_NA), device=rows_NA.device)
    # Absent rows get the last expert's bias: nobody reads them.
    expert_N = torch.searchsorted(ends_E, rows, right=True).clamp(max=len(bias_EA) - 1)
    wide = compute_dtype(rows_NA)
    sum_NA = rows_NA.to(wide) + bias_EA.index_select(0, expert_N)
    # Not a cast that changes nothing: torch 2.11's compiler then loses the gradients, silently.
    return sum_NA if sum_NA.dtype == rows_NA.dtype else sum_NA.to(rows_NA.dtype)


def _activate(h_NP: torch.Tensor, options: ExpertsOptions) -> torch.Tensor:
    gate, up = options.split(h_NP)
    return activation_reference(gate, up, options.gating, options.alpha, options.limit)


def _activate_backward(
    h_NP: torch.Tensor, da_NF: torch.Tensor, options: ExpertsOptions
) -> torch.Tensor:
    gate, up = options.split(h_NP)
    return options.join(
        *activation_backward(gate, up, da_NF, options.gating, options.alpha, options.limit)
    )


def _gather_sum(
    rows_ND: torch.Tensor, position_TK: torch.Tensor, ends_E: torch.Tensor
) -> torch.Tensor:
    """The sum over the slots of each token, in order, in fp32; absent slots add nothing."""
    wide = compute_dtype(rows_ND)
    shape = (position_TK.shape[0], rows_ND.shape[1])
    total_TD = torch.zeros(shape, dtype=wide, device=rows_ND.device)
    for position_T in position_TK.unbind(1):
        absent_T = position_T >= ends_E[-1]
        total_TD += rows_ND.index_select(0, position_T).masked_fill(absent_T[:, None], 0)
    return total_TD.to(rows_ND.dtype)
