"""The expert MLPs as grouped matrix products, forward and backward, any token counts.

Saved for backward: ``x`` and the pre-activation ``h``; the activation is computed again from ``h``
and the gathered rows again from ``x``. No atomics: the gradient of ``x`` is a gather and a sum in
fixed order. Derivation in README.md.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from slipstream.ops.activation.backward import activation_backward
from slipstream.ops.activation.reference import activation_reference
from slipstream.ops.moe.experts.grouped import ALIGN_BYTES, grouped_outer, grouped_rows
from slipstream.ops.moe.routing import Routing


def experts_grouped(
    x_TD: torch.Tensor,
    w13_EPD: torch.Tensor,
    w2_EDF: torch.Tensor,
    routing: Routing,
    gating: str,
    gated: bool,
) -> torch.Tensor:
    """Same rows as the reference; widths that are not aligned are padded with zeros."""
    width = x_TD.shape[1]
    w13_EPD, w2_EDF = w13_EPD.to(x_TD.dtype), w2_EDF.to(x_TD.dtype)
    step = ALIGN_BYTES // x_TD.element_size()
    pad_d, pad_f = -width % step, -w2_EDF.shape[2] % step
    if pad_d or pad_f:
        x_TD = F.pad(x_TD, (0, pad_d))
        halves = w13_EPD.reshape(len(w13_EPD), 2 if gated else 1, -1, width)
        w13_EPD = F.pad(halves, (0, pad_d, 0, pad_f)).flatten(1, 2)
        w2_EDF = F.pad(w2_EDF, (0, pad_f, 0, pad_d))
    y_ND = _Experts.apply(x_TD.contiguous(), w13_EPD, w2_EDF, routing, gating, gated)
    return y_ND[:, :width] if pad_d else y_ND


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        w13_EPD: torch.Tensor,
        w2_EDF: torch.Tensor,
        routing: Routing,
        gating: str,
        gated: bool,
    ) -> torch.Tensor:
        ends = routing.offsets_E1[1:]
        h_NP = grouped_rows(_gather(x_TD, routing), w13_EPD.mT, ends)
        y_ND = grouped_rows(_activate(h_NP, gating, gated), w2_EDF.mT, ends)
        ctx.save_for_backward(
            x_TD, h_NP, w13_EPD, w2_EDF, ends, routing.order_N, routing.position_N
        )
        ctx.options = (gating, gated, routing.top_k)
        return y_ND

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (dy_ND,) = grads
        x_TD, h_NP, w13_EPD, w2_EDF, ends, order_N, position_N = ctx.saved_tensors
        gating, gated, top_k = ctx.options
        dy_ND = dy_ND.contiguous()
        da_NF = grouped_rows(dy_ND, w2_EDF, ends)
        dw2_EDF = grouped_outer(dy_ND, _activate(h_NP, gating, gated), ends)
        gate, up = h_NP.chunk(2, dim=-1) if gated else (h_NP, None)
        dgate, dup = activation_backward(gate, up, da_NF, gating)
        dh_NP = dgate if dup is None else torch.cat((dgate, dup), dim=-1)
        dw13_EPD = grouped_outer(dh_NP, x_TD.index_select(0, order_N // top_k), ends)
        drows_ND = grouped_rows(dh_NP, w13_EPD, ends)
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        dx_TD = torch.zeros(x_TD.shape, dtype=wide, device=x_TD.device)
        for position_T in position_N.view(-1, top_k).unbind(1):
            dx_TD += drows_ND.index_select(0, position_T)
        return dx_TD.to(x_TD.dtype), dw13_EPD, dw2_EDF, None, None, None


def _gather(x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
    return x_TD.index_select(0, routing.order_N // routing.top_k)


def _activate(h_NP: torch.Tensor, gating: str, gated: bool) -> torch.Tensor:
    gate, up = h_NP.chunk(2, dim=-1) if gated else (h_NP, None)
    return activation_reference(gate, up, gating)
