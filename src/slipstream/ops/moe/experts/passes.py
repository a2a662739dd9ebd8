"""Forward and backward of the expert MLPs as a sequence of launches.

Backward never needs the rows the experts put out: with ``da = dout w2``, the activation from the
saved ``h``, the gradient of a row's weight is ``sum(da * a)``; derivation in README.md.
"""

import torch

from slipstream.ops.moe.experts import launch, tuned
from slipstream.ops.moe.experts.launch import Layout
from slipstream.ops.moe.experts.options import ExpertsOptions

SUM_PARTS = 8
MOST_ROW_BYTES = 1 << 31
"""Of the rows that experts put out, K for each token, in memory at once."""


def layout_of(
    order_N: torch.Tensor,
    position_N: torch.Tensor,
    offsets_E1: torch.Tensor,
    schedule: torch.Tensor,
    top_k: int,
) -> Layout:
    """The maps of a routing as the kernels take them."""
    return Layout(
        num_rows=order_N.shape[0],
        top_k=top_k,
        order_N=launch.of_dtype(order_N, torch.int64),
        position_N=launch.of_dtype(position_N, torch.int64),
        offsets_E1=launch.of_dtype(offsets_E1, torch.int32),
        schedule=launch.of_dtype(schedule, torch.int32),
    )


def forward(
    x_TD: torch.Tensor,
    w13_EPD: torch.Tensor,
    w2_EDF: torch.Tensor,
    b13_EP: torch.Tensor | None,
    b2_ED: torch.Tensor | None,
    weight_TK: torch.Tensor | None,
    shared_TD: torch.Tensor | None,
    residual_TD: torch.Tensor | None,
    layout: Layout,
    options: ExpertsOptions,
    *,
    keep_h: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (T, D), or rows (N, D) where there are no weights; and ``h``, empty if not kept."""
    x_TD = launch.aligned(x_TD)
    w13_EPD, w2_EDF = launch.aligned_weight(w13_EPD), launch.aligned_weight(w2_EDF)
    tiles = _tiles(("up", "down"), x_TD, layout, w2_EDF)
    h_NP, a_NF = launch.up(
        x_TD, w13_EPD, b13_EP, layout, options, tiles["up"], want_h=keep_h, want_a=True
    )
    assert a_NF is not None
    if weight_TK is None:
        out = launch.rows(a_NF, w2_EDF, b2_ED, layout, tiles["down"])
    else:
        out = _combined(
            a_NF, w2_EDF, b2_ED, weight_TK.contiguous(), shared_TD, residual_TD, layout,
            tiles["down"],
        )  # fmt: skip
    return out, x_TD.new_empty(0) if h_NP is None else h_NP


def _combined(
    a_NF: torch.Tensor,
    w2_EDF: torch.Tensor,
    b2_ED: torch.Tensor | None,
    weight_TK: torch.Tensor,
    shared_TD: torch.Tensor | None,
    residual_TD: torch.Tensor | None,
    layout: Layout,
    tile: tuned.Tile,
) -> torch.Tensor:
    """Down and combine, so many columns at once that their rows fit ``MOST_ROW_BYTES``."""
    width, size = w2_EDF.shape[1], layout.num_rows * a_NF.element_size()
    out = a_NF.new_empty(layout.num_rows // layout.top_k, width)
    beside = [None if t is None else t.contiguous() for t in (shared_TD, residual_TD)]
    step = max(1, MOST_ROW_BYTES // max(1, size) // tile.block_n) * tile.block_n
    for first in range(0, width, step):
        at = slice(first, first + step)
        bias = None if b2_ED is None else b2_ED[:, at]
        rows = launch.rows(a_NF, w2_EDF[:, at], bias, layout, tile)
        shared, residual = (None if t is None else t[:, at] for t in beside)
        launch.gather_sum(rows, weight_TK, shared, residual, layout, out[:, at])
        del rows  # before the next ones are made
    return out


def backward(
    dout: torch.Tensor,
    x_TD: torch.Tensor,
    h_NP: torch.Tensor | None,
    w13_EPD: torch.Tensor,
    w2_EDF: torch.Tensor,
    b13_EP: torch.Tensor | None,
    b2_ED: torch.Tensor | None,
    weight_TK: torch.Tensor | None,
    expert_TK: torch.Tensor,
    layout: Layout,
    options: ExpertsOptions,
    *,
    weight_dtype: torch.dtype,
    need_x: bool,
    need_w13: bool,
    need_w2: bool,
    dw13_into: torch.Tensor | None = None,
    dw2_into: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Gradients of x, w13, w2, b13, b2 and the weights; empty for what is not there or needed."""
    x_TD, dout = launch.aligned(x_TD), launch.aligned(dout)
    w13_EPD, w2_EDF = launch.aligned_weight(w13_EPD), launch.aligned_weight(w2_EDF)
    weight_TK = None if weight_TK is None else weight_TK.contiguous()
    tiles = _tiles(tuned.PRODUCTS, x_TD, layout, w2_EDF)
    saved = h_NP is not None
    flat = (need_w13 and tiles["dw13"].flatten) or (need_w2 and tiles["dw2"].flatten)
    room = layout.room if flat else 0
    h_NP = _kept(h_NP, x_TD, w13_EPD, b13_EP, layout, options, tiles["up"], room)
    rows_ND, gather = _rows_of(dout, weight_TK, layout, tiles["da"], room, need_w2)
    dh_NP, aw_NF, dweight_TK = activation_backward(
        rows_ND, w2_EDF, h_NP, weight_TK, layout, options, tiles["da"],
        gather=gather, overwrite=not saved, room=room,
    )  # fmt: skip
    del h_NP

    dw2 = dx = dw13 = db13 = db2 = None
    if need_w2:
        dw2 = launch.outer(
            rows_ND, aw_NF, layout, tiles["dw2"], like=w2_EDF, into=dw2_into, dtype=weight_dtype
        )  # fmt: skip
    del rows_ND, aw_NF
    if need_x:
        dx = launch.gather_sum(
            launch.rows(dh_NP, w13_EPD.mT, None, layout, tiles["dx"]), None, None, None, layout
        )
    if need_w13:
        dw13 = launch.outer(
            dh_NP, launch.spread_rows(x_TD, None, layout, room=room), layout, tiles["dw13"],
            like=w13_EPD, into=dw13_into, dtype=weight_dtype,
        )  # fmt: skip
    if b13_EP is not None:
        db13 = launch.row_sum(dh_NP, layout).to(b13_EP.dtype)
    if b2_ED is not None:
        db2, dweight_TK = _bias_gradients(dout, b2_ED, weight_TK, dweight_TK, expert_TK, layout)
    dw13, dw2 = dw13 if dw13_into is None else None, dw2 if dw2_into is None else None
    gradients = (dx, dw13, dw2, db13, db2, dweight_TK)
    return [x_TD.new_empty(0) if grad is None else grad for grad in gradients]


def activation_backward(
    rows: torch.Tensor,
    w2_EDF: torch.Tensor,
    h_NP: torch.Tensor,
    weight_TK: torch.Tensor | None,
    layout: Layout,
    options: ExpertsOptions,
    tile: tuned.Tile,
    *,
    gather: bool,
    overwrite: bool = False,
    room: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``dh (N, P)``, weighted ``a (N, F)`` and ``dweight`` from ``da = rows @ w2``.

    ``rows``: (N, D), or the tokens (T, D) where ``gather``. ``overwrite``: ``h`` is not needed any
    more, so ``dh`` may take its place. ``room``: rows that are allocated behind ``dh`` and ``a``.
    """
    if tile.fuse and not gather and not options.interleaved:
        return launch.da_activation(
            rows, w2_EDF, h_NP, weight_TK, layout, options, tile, overwrite=overwrite, room=room
        )
    da_NF = launch.rows(rows, w2_EDF.mT, None, layout, tile, gather=gather)
    return launch.activation_backward(
        da_NF, h_NP, weight_TK, layout, options, overwrite=overwrite, room=room
    )


def _kept(
    h_NP: torch.Tensor | None,
    x_TD: torch.Tensor,
    w13_EPD: torch.Tensor,
    b13_EP: torch.Tensor | None,
    layout: Layout,
    options: ExpertsOptions,
    tile: tuned.Tile,
    room: int,
) -> torch.Tensor:
    """``h`` as saved, or computed again, with room behind it for ``dh`` to take its place."""
    if h_NP is None:
        h_NP, _ = launch.up(
            x_TD, w13_EPD, b13_EP, layout, options, tile, want_h=True, want_a=False, room=room
        )
        assert h_NP is not None
    return h_NP


def _rows_of(
    dout: torch.Tensor,
    weight_TK: torch.Tensor | None,
    layout: Layout,
    tile: tuned.Tile,
    room: int,
    need_w2: bool,
) -> tuple[torch.Tensor, bool]:
    """``dout`` as rows, and whether ``da`` still has to gather them from its tokens.

    Without weights ``dout`` has rows already. ``dw2`` wants them copied out; ``da`` then has them
    for nothing.
    """
    if weight_TK is None:
        return dout, False
    if tile.gather_before or need_w2:
        return launch.spread_rows(dout, None, layout, room=room), False
    return dout, True


def _bias_gradients(
    dout: torch.Tensor,
    b2_ED: torch.Tensor,
    weight_TK: torch.Tensor | None,
    dweight_TK: torch.Tensor | None,
    expert_TK: torch.Tensor,
    layout: Layout,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    # The bias of the down projection, weighed like its rows, as dense products over (T, E).
    if weight_TK is None or dweight_TK is None:
        return launch.row_sum(dout, layout).to(b2_ED.dtype), None
    experts = layout.num_experts
    slot_TK = expert_TK.long().clamp(max=experts)  # absent slots share a column that is cut off
    dense = weight_TK.new_zeros(len(expert_TK), experts + 1)
    for slot_T, weight_T in zip(slot_TK.split(1, 1), weight_TK.split(1, 1), strict=True):
        # One after the other: a token may name an expert twice, and a sum by index has no order.
        dense.scatter_(1, slot_T, dense.gather(1, slot_T) + weight_T)
    dout = dout.float()
    db2 = _sum_of_products(dense[:, :experts], dout)
    dots = torch.nn.functional.pad(dout @ b2_ED.float().T, (0, 1))
    return db2.to(b2_ED.dtype), dweight_TK + dots.gather(1, slot_TK)


def _sum_of_products(left_TE: torch.Tensor, right_TD: torch.Tensor) -> torch.Tensor:
    # In parts, which are added up last: one chain over all tokens rounds more.
    pad = (0, 0, 0, -len(left_TE) % SUM_PARTS)
    left, right = (
        torch.nn.functional.pad(t, pad).unflatten(0, (SUM_PARTS, -1)) for t in (left_TE, right_TD)
    )
    return torch.bmm(left.mT, right).sum(0)


def _tiles(
    products: tuple[str, ...], x: torch.Tensor, layout: Layout, w2_EDF: torch.Tensor
) -> dict[str, tuned.Tile]:
    # What runs dry is for the current device.
    device = torch.device("cuda") if x.is_meta else x.device
    return tuned.lookup_all(products, device, x.dtype, layout.num_rows, w2_EDF)
