"""The Triton path of ``experts`` and ``moe_mlp``: one autograd node for the whole MLP.

Saved for backward: ``x``, the weights, the routing and, unless only ``x`` is to be kept, the
pre-activation ``h``. The rows the experts put out are not: combine's backward is part of this one.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from slipstream.ops.ahead import expecting
from slipstream.ops.moe.combine.extras import distinct
from slipstream.ops.moe.experts.accumulate import Accumulate, adding
from slipstream.ops.moe.experts.custom_ops import (
    moe_backward,
    moe_backward_into,
    moe_forward,
    moe_schedule,
)
from slipstream.ops.moe.experts.grouped import ALIGN_BYTES
from slipstream.ops.moe.experts.options import ExpertsOptions
from slipstream.ops.moe.routing import Routing


def experts_triton(
    x_TD: torch.Tensor,
    w13_EPD: torch.Tensor,
    w2_EDF: torch.Tensor,
    b13_EP: torch.Tensor | None,
    b2_ED: torch.Tensor | None,
    routing: Routing,
    options: ExpertsOptions,
    accumulate: Accumulate | None = None,
) -> torch.Tensor:
    """Rows sorted by expert (N, D); rows of absent slots are not written."""
    return _run(
        x_TD, w13_EPD, w2_EDF, b13_EP, b2_ED, None, None, None, routing, options, accumulate
    )


def moe_mlp_triton(
    x_TD: torch.Tensor,
    w13_EPD: torch.Tensor,
    w2_EDF: torch.Tensor,
    b13_EP: torch.Tensor | None,
    b2_ED: torch.Tensor | None,
    routing: Routing,
    residual_TD: torch.Tensor | None,
    shared_TD: torch.Tensor | None,
    options: ExpertsOptions,
    accumulate: Accumulate | None = None,
) -> torch.Tensor:
    """Experts and combine in one: (T, D)."""
    weight_TK = routing.weight_TK.to(torch.float32)
    return _run(
        x_TD, w13_EPD, w2_EDF, b13_EP, b2_ED, weight_TK, shared_TD, residual_TD, routing, options,
        accumulate,
    )  # fmt: skip


def _run(
    x_TD: torch.Tensor,
    w13_EPD: torch.Tensor,
    w2_EDF: torch.Tensor,
    b13_EP: torch.Tensor | None,
    b2_ED: torch.Tensor | None,
    weight_TK: torch.Tensor | None,
    shared_TD: torch.Tensor | None,
    residual_TD: torch.Tensor | None,
    routing: Routing,
    options: ExpertsOptions,
    accumulate: Accumulate | None,
) -> torch.Tensor:
    """Widths that do not fill 16 bytes are padded with zeros, which changes no result."""
    width, hidden = w2_EDF.shape[1:]
    step = ALIGN_BYTES // x_TD.element_size()
    pad_d, pad_f = -width % step, -hidden % step
    if pad_d or pad_f:
        if accumulate is not None:  # the buffers do not have the padding
            run = adding(_run)
            rest = (b13_EP, b2_ED, weight_TK, shared_TD, residual_TD, routing, options, None)
            return run(x_TD, w13_EPD, w2_EDF, *rest, accumulate=accumulate)
        x_TD, w2_EDF = F.pad(x_TD, (0, pad_d)), F.pad(w2_EDF, (0, pad_f, 0, pad_d))
        w13_EPD = _pad_rows(F.pad(w13_EPD, (0, pad_d)), pad_f, options)
        if b13_EP is not None:
            b13_EP = _pad_rows(b13_EP[:, :, None], pad_f, options)[:, :, 0]
        b2_ED, shared_TD, residual_TD = (
            None if t is None else F.pad(t, (0, pad_d)) for t in (b2_ED, shared_TD, residual_TD)
        )
    shared_TD, residual_TD = distinct(x_TD, shared_TD, residual_TD)
    schedule = routing.schedule
    if schedule is None:
        schedule = moe_schedule(routing.offsets_E1, routing.order_N.shape[0])
    out = _Experts.apply(
        x_TD, w13_EPD, w2_EDF, b13_EP, b2_ED, weight_TK, shared_TD, residual_TD,
        routing.expert_TK, routing.order_N, routing.position_N, routing.offsets_E1, schedule,
        options, accumulate,
    )  # fmt: skip
    return out[:, :width] if pad_d else out


def _pad_rows(w13_EPD: torch.Tensor, pad: int, options: ExpertsOptions) -> torch.Tensor:
    if not options.gated or options.interleaved:
        return F.pad(w13_EPD, (0, 0, 0, 2 * pad if options.gated else pad))
    experts, rows, width = w13_EPD.shape
    halves = w13_EPD.reshape(experts, 2, rows // 2, width)
    return F.pad(halves, (0, 0, 0, pad)).reshape(experts, rows + 2 * pad, width)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        w13_EPD: torch.Tensor,
        w2_EDF: torch.Tensor,
        b13_EP: torch.Tensor | None,
        b2_ED: torch.Tensor | None,
        weight_TK: torch.Tensor | None,
        shared_TD: torch.Tensor | None,
        residual_TD: torch.Tensor | None,
        expert_TK: torch.Tensor,
        order_N: torch.Tensor,
        position_N: torch.Tensor,
        offsets_E1: torch.Tensor,
        schedule: torch.Tensor,
        options: ExpertsOptions,
        accumulate: Accumulate | None,
    ) -> torch.Tensor:
        ctx.accumulate = accumulate
        ctx.weight_dtypes = w13_EPD.dtype, w2_EDF.dtype
        ctx.extras = [None if t is None else t.dtype for t in (shared_TD, residual_TD)]
        ctx.options, ctx.top_k = options, expert_TK.shape[1]
        w13_EPD, w2_EDF = w13_EPD.to(x_TD.dtype), w2_EDF.to(x_TD.dtype)
        keep_h = options.save == "h" and any(ctx.needs_input_grad)
        arguments = (
            x_TD, w13_EPD, w2_EDF, b13_EP, b2_ED, weight_TK, shared_TD, residual_TD,
            order_N, position_N, offsets_E1, schedule, ctx.top_k, *_scalars(options), keep_h,
        )  # fmt: skip
        needed, dtype13 = ctx.needs_input_grad, ctx.weight_dtypes[0]
        with expecting(_all_launches, arguments, expert_TK, dtype13, needed, accumulate):
            out, h_NP = moe_forward(*arguments)
        ctx.save_for_backward(
            x_TD, h_NP if keep_h else None, w13_EPD, w2_EDF, b13_EP, b2_ED, weight_TK,
            expert_TK, order_N, position_N, offsets_E1, schedule,
        )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (dout,) = grads
        saved = ctx.saved_tensors  # read once: activation checkpointing hands them out once
        weight_TK = saved[6]
        need_x, need_w13, need_w2, need_b13, need_b2, *_ = ctx.needs_input_grad
        dtype13, dtype2 = ctx.weight_dtypes
        arguments: tuple[Any, ...] = (
            dout, *saved, ctx.top_k, *_scalars(ctx.options), dtype13, need_x, need_w13, need_w2
        )  # fmt: skip
        dw13: Any = None
        dw2: Any = None
        if ctx.accumulate is None:
            # Another number of tokens can need other kernels here only.
            with expecting(moe_backward.function, *arguments):
                dx, dw13, dw2, db13, db2, dweight = moe_backward(*arguments)
        else:
            arguments = *arguments, *ctx.accumulate
            with expecting(moe_backward_into, *arguments):
                dx, db13, db2, dweight = moe_backward_into(*arguments)
            need_w13 = need_w2 = False
        dshared, dresidual = (None if dtype is None else dout.to(dtype) for dtype in ctx.extras)
        return (
            dx if need_x else None,
            dw13 if need_w13 else None,
            dw2.to(dtype2) if need_w2 else None,
            db13 if need_b13 else None,
            db2 if need_b2 else None,
            None if weight_TK is None else dweight,
            dshared,
            dresidual,
            *[None] * 7,
        )


def _all_launches(
    arguments: tuple[Any, ...],
    expert_TK: torch.Tensor,
    dtype13: torch.dtype,
    needed: tuple[bool, ...],
    accumulate: Accumulate | None,
) -> None:
    """What forward, with these arguments, and its backward launch."""
    out, h_NP = moe_forward.function(*arguments)
    if not any(needed):
        return
    x_TD, *weights, _, _, order_N, position_N, offsets_E1, schedule = arguments[:12]
    *scalars, keep_h = arguments[12:]
    maps = expert_TK, order_N, position_N, offsets_E1, schedule
    saved = x_TD, h_NP if keep_h else None, *weights, *maps
    both = (out, *saved, *scalars, dtype13, *needed[:3])
    backward: Callable[..., Any] = (
        moe_backward.function if accumulate is None else moe_backward_into
    )
    backward(*both, *(accumulate or ()))


def _scalars(options: ExpertsOptions) -> tuple[str, bool, float, float]:
    return options.activation, options.interleaved, options.alpha, options.limit
