"""Launches of the expert kernels: allocation, grids, descriptors. Widths are multiples of 16 bytes.

Functions take tensors as they are and return new ones; nothing here synchronises.
"""

from dataclasses import dataclass

import torch

from slipstream.ops.activation.launch import function_name
from slipstream.ops.launching import Descriptor, launch
from slipstream.ops.moe.combine.kernels import (
    moe_gather_sum_kernel,
    moe_slot_dots_kernel,
    moe_spread_rows_kernel,
)
from slipstream.ops.moe.experts.backward_kernels import (
    moe_activation_bwd_kernel,
    moe_da_kernel,
    moe_outer_kernel,
    moe_row_sum_kernel,
    moe_tails_kernel,
)
from slipstream.ops.moe.experts.grouped import ALIGN_BYTES
from slipstream.ops.moe.experts.kernels import (
    TILE_ROWS,
    moe_rows_kernel,
    moe_schedule_kernel,
    moe_up_kernel,
)
from slipstream.ops.moe.experts.options import ExpertsOptions
from slipstream.ops.moe.experts.tuned import Tile
from slipstream.ops.triton_support import cdiv, multiprocessors, next_power_of_2

MAX_POINTWISE = 4096
TAIL_ROWS = 64
"""Longest block of the contraction over rows that room for tails is made for."""
ROWS_PER_TILE = TILE_ROWS.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the rows of each expert are: int64 for slots and rows, int32 for the rest."""

    num_rows: int
    """N, absent slots included."""
    top_k: int
    order_N: torch.Tensor
    position_N: torch.Tensor
    offsets_E1: torch.Tensor
    schedule: torch.Tensor

    @classmethod
    def of_slots(cls, position_N: torch.Tensor, offsets_E1: torch.Tensor, top_k: int) -> "Layout":
        """What gathers over slots need: no order, no schedule."""
        none, rows = position_N.new_empty(0), position_N.shape[0]
        return cls(
            num_rows=rows,
            top_k=top_k,
            order_N=none,
            position_N=of_dtype(position_N, torch.int64),
            offsets_E1=of_dtype(offsets_E1, torch.int32),
            schedule=none,
        )

    @classmethod
    def of_rows(cls, offsets_E1: torch.Tensor, num_rows: int) -> "Layout":
        """Rows that are grouped already: no slots."""
        none, offsets_E1 = offsets_E1.new_empty(0), of_dtype(offsets_E1, torch.int32)
        maps = {"order_N": none, "position_N": none, "offsets_E1": offsets_E1}
        return cls(num_rows=num_rows, top_k=1, schedule=schedule(offsets_E1, num_rows), **maps)

    @property
    def num_entries(self) -> int:
        """Room for tiles in the schedule: the most there can be."""
        return self.schedule.shape[0] - 1 - self.num_experts

    @property
    def num_experts(self) -> int:
        """E."""
        return self.offsets_E1.shape[0] - 1

    @property
    def room(self) -> int:
        """Rows behind the N that ``outer`` can use as ``moe_tails_kernel`` says."""
        return self.num_experts * TAIL_ROWS


def of_dtype(integers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``integers`` as the kernels take them."""
    return (integers if integers.dtype == dtype else integers.to(dtype)).contiguous()


def schedule(offsets_E1: torch.Tensor, num_rows: int) -> torch.Tensor:
    """``Routing.schedule`` from the offsets."""
    experts, offsets_E1 = offsets_E1.shape[0] - 1, of_dtype(offsets_E1, torch.int32)
    entries = num_rows // ROWS_PER_TILE + min(experts, num_rows)
    out = torch.empty(1 + entries + experts, 2, dtype=torch.int32, device=offsets_E1.device)
    launch(
        moe_schedule_kernel, (experts,),
        offsets_E1, out, entries, E=experts, BLOCK_E=next_power_of_2(experts), BLOCK=64,
        num_warps=1,
    )  # fmt: skip
    return out


def up(
    x: torch.Tensor,
    w13_EPD: torch.Tensor,
    b13_EP: torch.Tensor | None,
    layout: Layout,
    options: ExpertsOptions,
    tile: Tile,
    *,
    want_h: bool,
    want_a: bool,
    room: int = 0,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``h (N, P)`` and ``a (N, F)`` of tokens x (T, D); None for what is not wanted.

    ``room``: rows that are allocated behind those of ``h``.
    """
    rows, hidden = w13_EPD.shape[1], w13_EPD.shape[1] // (2 if options.gated else 1)
    h = x.new_empty(layout.num_rows + room, rows) if want_h else None
    a = x.new_empty(layout.num_rows, hidden) if want_a else None
    if not layout.num_rows:  # a descriptor cannot be empty
        return h, a
    split = options.gated and not options.interleaved
    if tile.gather_before:
        x = spread_rows(x, None, layout)
    weight, transposed = _weight_descriptor(w13_EPD, tile, split)
    width = tile.block_n // 2 if options.gated else tile.block_n
    launch(
        moe_up_kernel, _persistent(layout, tile, cdiv(hidden, width), x.device),
        x, None if not tile.gather_before else _rows_descriptor(x, tile), weight,
        _contiguous(b13_EP), h, a,
        layout.order_N, layout.offsets_E1, layout.schedule,
        float(options.alpha), float(options.limit),
        E=layout.num_experts, TOP_K=layout.top_k, D=x.shape[1], F=hidden,
        ACTIVATION=function_name(options.gating, x.dtype),
        GATED=options.gated, INTERLEAVED=options.interleaved,
        TRANSPOSED=transposed, GATHER=not tile.gather_before, PRECISION=_precision(x),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP=tile.group,
        STAGES=tile.num_stages, num_warps=tile.num_warps,
    )  # fmt: skip
    return h, a


def rows(
    x: torch.Tensor,
    weight_EOI: torch.Tensor,
    bias_EO: torch.Tensor | None,
    layout: Layout,
    tile: Tile,
    *,
    gather: bool = False,
    zero: bool = False,
) -> torch.Tensor:
    """``x[r] @ weight[e]^T + bias[e]`` (N, O); x holds rows, or tokens where ``gather``.

    Rows past the last offset are zeros where ``zero``, else not written.
    """
    new = x.new_zeros if zero else x.new_empty
    out = new(layout.num_rows, weight_EOI.shape[1])
    if not layout.num_rows:
        return out
    weight, transposed = _weight_descriptor(weight_EOI, tile, split=False)
    blocks = cdiv(out.shape[1], tile.block_n)
    launch(
        moe_rows_kernel, _persistent(layout, tile, blocks, x.device),
        x, None if gather else _rows_descriptor(x, tile), weight, _contiguous(bias_EO), out,
        layout.order_N, layout.offsets_E1, layout.schedule,
        TOP_K=layout.top_k, WIDTH=x.shape[1], OUT=out.shape[1],
        TRANSPOSED=transposed, GATHER=gather, PRECISION=_precision(x),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP=tile.group,
        STAGES=tile.num_stages, FLATTEN=tile.flatten, num_warps=tile.num_warps,
    )  # fmt: skip
    return out


def activation_backward(
    da_NF: torch.Tensor,
    h_NP: torch.Tensor,
    weight_TK: torch.Tensor | None,
    layout: Layout,
    options: ExpertsOptions,
    *,
    overwrite: bool = False,
    room: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``dh (N, P)`` in the row order of w13, weighted ``a (N, F)``, ``dweight`` (T, K) or None.

    ``overwrite``: ``dh`` takes the place of ``h``. ``room``: rows that are allocated behind both.
    """
    hidden, together = da_NF.shape[1], _together(da_NF)
    dh_NP, aw_NF = _for_dh(h_NP, hidden, layout, options, overwrite, room)
    dweight_TK = None if weight_TK is None else torch.empty_like(weight_TK)
    block = min(MAX_POINTWISE, next_power_of_2(hidden))
    launch(
        moe_activation_bwd_kernel, (cdiv(layout.num_rows, together),),
        da_NF, h_NP, weight_TK, layout.order_N, layout.offsets_E1, dh_NP, aw_NF, dweight_TK,
        layout.num_rows, float(options.alpha), float(options.limit),
        E=layout.num_experts, F=hidden,
        ACTIVATION=function_name(options.gating, h_NP.dtype),
        GATED=options.gated, INTERLEAVED=options.interleaved,
        BLOCK_M=together, BLOCK_F=block, num_warps=4 if block <= 1024 else 8,
    )  # fmt: skip
    return dh_NP, aw_NF, dweight_TK


def da_activation(
    rows_ND: torch.Tensor,
    w2_EDF: torch.Tensor,
    h_NP: torch.Tensor,
    weight_TK: torch.Tensor | None,
    layout: Layout,
    options: ExpertsOptions,
    tile: Tile,
    *,
    overwrite: bool = False,
    room: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``activation_backward`` of ``rows @ w2`` in one launch, which never writes the product.

    ``dh`` and ``a`` are not written past the last offset.
    """
    hidden, blocks = w2_EDF.shape[2], cdiv(w2_EDF.shape[2], tile.block_n)
    dh_NP, aw_NF = _for_dh(h_NP, hidden, layout, options, overwrite, room)
    partial = None
    if weight_TK is not None:
        partial = weight_TK.new_zeros(*weight_TK.shape, blocks)
    if layout.num_rows:
        weight, transposed = _weight_descriptor(w2_EDF.mT, tile, split=False)
        launch(
            moe_da_kernel, _persistent(layout, tile, blocks, h_NP.device),
            _rows_descriptor(rows_ND, tile), weight, h_NP, weight_TK, dh_NP, aw_NF, partial,
            layout.order_N, layout.offsets_E1, layout.schedule,
            float(options.alpha), float(options.limit),
            D=rows_ND.shape[1], F=hidden,
            ACTIVATION=function_name(options.gating, h_NP.dtype), GATED=options.gated,
            TRANSPOSED=transposed, PRECISION=_precision(rows_ND),
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP=tile.group,
            STAGES=tile.num_stages, FLATTEN=tile.flatten, num_warps=tile.num_warps,
        )  # fmt: skip
    return dh_NP, aw_NF, None if partial is None else partial.sum(-1)


def outer(
    left: torch.Tensor,
    right: torch.Tensor,
    layout: Layout,
    tile: Tile,
    *,
    like: torch.Tensor,
    into: torch.Tensor | None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``left[rows of e]^T right[rows of e]`` (E, L, R) in the layout of ``like``.

    In ``dtype``; None: that of ``like``. Added to ``into`` where given, whose layout and dtype then
    count and which is returned. ``tile.flatten`` asks for ``layout.room`` rows behind those of
    both, which are overwritten; without them it has no effect.
    """
    like, dtype = (like, dtype or like.dtype) if into is None else (into, into.dtype)
    if like.stride(1) == 1 and like.stride(2) != 1:
        flipped = None if into is None else into.mT
        return outer(right, left, layout, tile, like=like.mT, into=flipped, dtype=dtype).mT
    shape = (layout.num_experts, left.shape[1], right.shape[1])
    if into is not None and not into.is_contiguous():
        raise AssertionError(f"gradients cannot be added to strides {into.stride()}")
    if not layout.num_rows:
        return torch.zeros(shape, dtype=dtype, device=left.device) if into is None else into
    out = torch.empty(shape, dtype=dtype, device=left.device) if into is None else into
    room = min(left.shape[0], right.shape[0]) - layout.num_rows
    tails = tile.flatten and room >= layout.num_experts * tile.block_k
    if tails:
        block = 128
        launch(
            moe_tails_kernel, (shape[0], cdiv(shape[1], block) + cdiv(shape[2], block)),
            left, right, layout.offsets_E1, layout.num_rows,
            LEFT=shape[1], RIGHT=shape[2], BLOCK=block, BLOCK_K=tile.block_k,
        )  # fmt: skip
    blocks = cdiv(shape[1], tile.block_m) * cdiv(shape[2], tile.block_n)
    launch(
        moe_outer_kernel, _grid(layout.num_experts * blocks, tile, left.device),
        left, _block_descriptor(left, tile.block_k, tile.block_m),
        right, _block_descriptor(right, tile.block_k, tile.block_n),
        out, _gradient_descriptor(out, tile) if into is None else None,
        layout.offsets_E1, layout.schedule, layout.num_entries, layout.num_rows,
        E=shape[0], LEFT=shape[1], RIGHT=shape[2], TAILS=tails, ACCUMULATE=into is not None,
        PRECISION=_precision(left),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP=tile.group,
        STAGES=tile.num_stages, num_warps=tile.num_warps,
    )  # fmt: skip
    return out


def row_sum(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Sum of the rows of each expert, fp32 (E, width)."""
    width, block = x.shape[1], 64
    out = torch.empty(layout.num_experts, width, dtype=torch.float32, device=x.device)
    launch(
        moe_row_sum_kernel, (layout.num_experts, cdiv(width, block)),
        x, out, layout.offsets_E1, WIDTH=width, BLOCK=block, BLOCK_K=64,
    )  # fmt: skip
    return out


def spread_rows(
    x_TD: torch.Tensor,
    weight_TK: torch.Tensor | None,
    layout: Layout,
    *,
    zero: bool = False,
    room: int = 0,
) -> torch.Tensor:
    """The token of each row, times its weight where given, (N, D); ``zero``: at absent slots.

    ``room``: rows that are allocated behind those.
    """
    tokens, width = x_TD.shape
    out = x_TD.new_empty(layout.num_rows + room, width)
    block, together = min(MAX_POINTWISE, next_power_of_2(width)), _together(x_TD)
    launch(
        moe_spread_rows_kernel, (cdiv(tokens, together), cdiv(width, block)),
        x_TD, weight_TK, layout.position_N, layout.offsets_E1, out, tokens,
        E=layout.num_experts, TOP_K=layout.top_k, D=width, ZERO=zero,
        BLOCK_T=together, BLOCK_D=block,
        num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return out


def slot_dots(dout_TD: torch.Tensor, rows_ND: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The product of each slot's row with its token's ``dout``, fp32 (T, K)."""
    tokens, width = dout_TD.shape
    out = torch.empty(tokens, layout.top_k, dtype=torch.float32, device=dout_TD.device)
    together = _together(dout_TD)
    launch(
        moe_slot_dots_kernel, (cdiv(layout.num_rows, together),),
        dout_TD, rows_ND, layout.position_N, layout.offsets_E1, out, layout.num_rows,
        E=layout.num_experts, TOP_K=layout.top_k, D=width, BLOCK_T=together,
        BLOCK_D=min(MAX_POINTWISE, next_power_of_2(width)), num_warps=4,
    )  # fmt: skip
    return out


def gather_sum(
    rows_ND: torch.Tensor,
    weight_TK: torch.Tensor | None,
    shared_TD: torch.Tensor | None,
    residual_TD: torch.Tensor | None,
    layout: Layout,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The (weighted) sum of the rows of each token, plus what else is given, (T, D).

    ``out``, ``shared`` and ``residual`` may be the same columns of wider matrices.
    """
    tokens, width = layout.num_rows // layout.top_k, rows_ND.shape[1]
    if out is None:
        out = rows_ND.new_empty(tokens, width)
        shared_TD, residual_TD = _contiguous(shared_TD), _contiguous(residual_TD)
    block, together = min(MAX_POINTWISE, next_power_of_2(width)), _together(rows_ND)
    launch(
        moe_gather_sum_kernel, (cdiv(tokens, together), cdiv(width, block)),
        rows_ND, weight_TK, layout.position_N, layout.offsets_E1, shared_TD, residual_TD, out,
        tokens,
        E=layout.num_experts, TOP_K=layout.top_k, D=width, STRIDE=out.stride(0),
        BLOCK_T=together, BLOCK_D=block,
        num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return out


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, copied unless it is contiguous at an address that descriptors accept."""
    fits = tensor.is_contiguous() and tensor.data_ptr() % ALIGN_BYTES == 0
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def aligned_weight(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` (E, A, B), copied unless rows or columns lie as descriptors want them."""
    step = ALIGN_BYTES // weight.element_size()
    expert, row, column = weight.stride()
    laid_out = expert % step == 0 and (
        (column == 1 and row % step == 0) or (row == 1 and column % step == 0)
    )
    if laid_out and weight.data_ptr() % ALIGN_BYTES == 0:
        return weight
    return weight.clone(memory_format=torch.contiguous_format)


def _for_dh(
    h_NP: torch.Tensor,
    hidden: int,
    layout: Layout,
    options: ExpertsOptions,
    overwrite: bool,
    room: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for ``dh`` and the weighted ``a``."""
    rows = layout.num_rows + room
    # A program reads gate and up of an element before it writes their gradients there; interleaved
    # gradients lie elsewhere than what they are made from.
    overwrite = overwrite and not options.interleaved and h_NP.shape[0] >= rows
    dh_NP = h_NP if overwrite else h_NP.new_empty(rows, h_NP.shape[1])
    return dh_NP, h_NP.new_empty(rows, hidden)


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _together(x: torch.Tensor) -> int:
    # One row or token a program on a GPU; a program costs the interpreter the same for many.
    return 64 if x.is_cpu else 1


def _precision(x: torch.Tensor) -> str:
    # As cuBLAS does: fp32 in full unless the user allows TF32. Other dtypes have one precision.
    wide = x.dtype == torch.float32 and not x.is_cpu
    allowed = wide and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if allowed else "ieee"


def _persistent(layout: Layout, tile: Tile, blocks: int, device: torch.device) -> tuple[int]:
    return _grid(layout.num_entries * (ROWS_PER_TILE // tile.block_m) * blocks, tile, device)


def _grid(tiles: int, tile: Tile, device: torch.device) -> tuple[int]:
    if device.type != "cuda":
        return (max(1, min(tiles, 4)),)
    return (max(1, min(tiles, multiprocessors(device) * tile.programs_per_sm)),)


def _rows_descriptor(x: torch.Tensor, tile: Tile) -> Descriptor:
    return _block_descriptor(x, tile.block_m, tile.block_k)


def _block_descriptor(x: torch.Tensor, rows: int, columns: int) -> Descriptor:
    return Descriptor(x, list(x.shape), list(x.stride()), [rows, columns])


def _gradient_descriptor(out_ELR: torch.Tensor, tile: Tile) -> Descriptor | None:
    """None where rows of the gradient, whose dtype the operands' padding is not for, do not fit."""
    if out_ELR.stride(1) * out_ELR.element_size() % ALIGN_BYTES:
        return None
    columns = tile.block_n // (4 if out_ELR.dtype == torch.float32 else 2)
    block = [1, tile.block_m, columns]
    return Descriptor(out_ELR, list(out_ELR.shape), list(out_ELR.stride()), block)


def _weight_descriptor(
    weight_EOI: torch.Tensor, tile: Tile, split: bool
) -> tuple[Descriptor, bool]:
    """Descriptor of (E, out, in) weights in the layout they have, and whether that is (E, in, out).

    ``split``: out rows are two halves and a block takes the same columns of both.
    """
    experts, out, inner = weight_EOI.shape
    expert, row, column = weight_EOI.stride()
    transposed = column != 1
    half = tile.block_n // 2
    if split:
        if transposed:
            shape, strides = [experts, inner, 2, out // 2], [expert, column, out // 2, 1]
            block = [1, tile.block_k, 2, half]
        else:
            shape, strides = [experts, 2, out // 2, inner], [expert, out // 2 * row, row, 1]
            block = [1, 2, half, tile.block_k]
    elif transposed:
        shape, strides = [experts, inner, out], [expert, column, 1]
        block = [1, tile.block_k, tile.block_n]
    else:
        shape, strides = [experts, out, inner], [expert, row, 1]
        block = [1, tile.block_n, tile.block_k]
    return Descriptor(weight_EOI, shape, strides, block), transposed
