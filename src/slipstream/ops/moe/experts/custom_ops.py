"""The Triton path of the experts as custom ops, which ``torch.compile`` treats as one step each.

Triton is imported when an op first runs, so that importing Slipstream does not need it.
"""

import functools
from typing import Any

import torch

from slipstream.ops.custom import custom_op
from slipstream.ops.moe.experts.options import ExpertsOptions


@functools.lru_cache(maxsize=64, typed=True)
def _options(activation: str, interleaved: bool, alpha: float, limit: float) -> ExpertsOptions:
    return ExpertsOptions(activation=activation, interleaved=interleaved, alpha=alpha, limit=limit)


@custom_op("moe_schedule")
def moe_schedule(offsets_E1: torch.Tensor, num_rows: int) -> torch.Tensor:
    """``Routing.schedule`` from the offsets."""
    from slipstream.ops.moe.experts import launch  # noqa: PLC0415

    return launch.schedule(offsets_E1, num_rows)


@moe_schedule.register_fake
def _(offsets_E1: torch.Tensor, num_rows: int) -> torch.Tensor:
    experts = offsets_E1.shape[0] - 1
    entries = num_rows // 128 + min(experts, num_rows)
    return offsets_E1.new_empty(1 + entries + experts, 2)


@custom_op("moe_forward")
def moe_forward(
    x_TD: torch.Tensor,
    w13_EPD: torch.Tensor,
    w2_EDF: torch.Tensor,
    b13_EP: torch.Tensor | None,
    b2_ED: torch.Tensor | None,
    weight_TK: torch.Tensor | None,
    shared_TD: torch.Tensor | None,
    residual_TD: torch.Tensor | None,
    order_N: torch.Tensor,
    position_N: torch.Tensor,
    offsets_E1: torch.Tensor,
    schedule: torch.Tensor,
    top_k: int,
    activation: str,
    interleaved: bool,
    alpha: float,
    limit: float,
    keep_h: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's output (T, D), or rows (N, D) without weights; and ``h``, empty if not kept."""
    from slipstream.ops.moe.experts import passes  # noqa: PLC0415

    options = _options(activation, interleaved, alpha, limit)
    layout = passes.layout_of(order_N, position_N, offsets_E1, schedule, top_k)
    return passes.forward(
        x_TD, w13_EPD, w2_EDF, b13_EP, b2_ED, weight_TK, shared_TD, residual_TD, layout, options,
        keep_h=keep_h,
    )  # fmt: skip


@moe_forward.register_fake
def _(
    x_TD: torch.Tensor,
    w13_EPD: torch.Tensor,
    w2_EDF: torch.Tensor,
    b13_EP: torch.Tensor | None,
    b2_ED: torch.Tensor | None,
    weight_TK: torch.Tensor | None,
    shared_TD: torch.Tensor | None,
    residual_TD: torch.Tensor | None,
    order_N: torch.Tensor,
    position_N: torch.Tensor,
    offsets_E1: torch.Tensor,
    schedule: torch.Tensor,
    top_k: int,
    activation: str,
    interleaved: bool,
    alpha: float,
    limit: float,
    keep_h: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = order_N.shape[0] if weight_TK is None else x_TD.shape[0]
    h = x_TD.new_empty(order_N.shape[0], w13_EPD.shape[1]) if keep_h else x_TD.new_empty(0)
    return x_TD.new_empty(rows, x_TD.shape[1]), h


@custom_op("moe_backward")
def moe_backward(
    dout: torch.Tensor,
    x_TD: torch.Tensor,
    h_NP: torch.Tensor | None,
    w13_EPD: torch.Tensor,
    w2_EDF: torch.Tensor,
    b13_EP: torch.Tensor | None,
    b2_ED: torch.Tensor | None,
    weight_TK: torch.Tensor | None,
    expert_TK: torch.Tensor,
    order_N: torch.Tensor,
    position_N: torch.Tensor,
    offsets_E1: torch.Tensor,
    schedule: torch.Tensor,
    top_k: int,
    activation: str,
    interleaved: bool,
    alpha: float,
    limit: float,
    weight_dtype: torch.dtype,
    need_x: bool,
    need_w13: bool,
    need_w2: bool,
) -> list[torch.Tensor]:
    """Gradients of x, w13, w2, b13, b2 and the weights; empty for what is not needed."""
    from slipstream.ops.moe.experts import passes  # noqa: PLC0415

    options = _options(activation, interleaved, alpha, limit)
    layout = passes.layout_of(order_N, position_N, offsets_E1, schedule, top_k)
    return passes.backward(
        dout, x_TD, h_NP, w13_EPD, w2_EDF, b13_EP, b2_ED, weight_TK, expert_TK, layout, options,
        weight_dtype=weight_dtype, need_x=need_x, need_w13=need_w13, need_w2=need_w2,
    )  # fmt: skip


@moe_backward.register_fake
def _(
    dout: torch.Tensor,
    x_TD: torch.Tensor,
    h_NP: torch.Tensor | None,
    w13_EPD: torch.Tensor,
    w2_EDF: torch.Tensor,
    b13_EP: torch.Tensor | None,
    b2_ED: torch.Tensor | None,
    weight_TK: torch.Tensor | None,
    *rest: Any,
) -> list[torch.Tensor]:
    weight_dtype, need_x, need_w13, need_w2 = rest[-4:]

    def like(tensor: torch.Tensor | None, wanted: bool = True) -> torch.Tensor:
        if tensor is None or not wanted:
            return x_TD.new_empty(0)
        return torch.empty_like(tensor)

    def like_weight(weight: torch.Tensor, wanted: bool) -> torch.Tensor:
        if not wanted:
            return x_TD.new_empty(0)
        flipped = weight.stride(2) != 1 and weight.stride(1) == 1
        rows, columns = weight.shape[1:]
        sizes = (weight.shape[0], columns, rows) if flipped else weight.shape
        out = weight.new_empty(sizes, dtype=weight_dtype)
        return out.mT if flipped else out

    return [
        like(x_TD, need_x),
        like_weight(w13_EPD, need_w13),
        like_weight(w2_EDF, need_w2),
        like(b13_EP),
        like(b2_ED),
        like(weight_TK),
    ]


def moe_backward_into(
    dout: torch.Tensor,
    x_TD: torch.Tensor,
    h_NP: torch.Tensor | None,
    w13_EPD: torch.Tensor,
    w2_EDF: torch.Tensor,
    b13_EP: torch.Tensor | None,
    b2_ED: torch.Tensor | None,
    weight_TK: torch.Tensor | None,
    expert_TK: torch.Tensor,
    order_N: torch.Tensor,
    position_N: torch.Tensor,
    offsets_E1: torch.Tensor,
    schedule: torch.Tensor,
    top_k: int,
    activation: str,
    interleaved: bool,
    alpha: float,
    limit: float,
    weight_dtype: torch.dtype,
    need_x: bool,
    need_w13: bool,
    need_w2: bool,
    dw13_into: torch.Tensor,
    dw2_into: torch.Tensor,
) -> list[torch.Tensor]:
    """Gradients of x, b13, b2 and the weights; needed ones of w13 and w2 go to the buffers.

    Not a custom op: the compiler takes none that changes an argument of a backward.
    """
    from slipstream.ops.moe.experts import passes  # noqa: PLC0415

    options = _options(activation, interleaved, alpha, limit)
    layout = passes.layout_of(order_N, position_N, offsets_E1, schedule, top_k)
    dx, _, _, *others = passes.backward(
        dout, x_TD, h_NP, w13_EPD, w2_EDF, b13_EP, b2_ED, weight_TK, expert_TK, layout, options,
        weight_dtype=weight_dtype, need_x=need_x, need_w13=need_w13, need_w2=need_w2,
        dw13_into=dw13_into, dw2_into=dw2_into,
    )  # fmt: skip
    return [dx, *others]
