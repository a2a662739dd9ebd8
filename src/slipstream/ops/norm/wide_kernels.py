"""Norms of rows too wide for registers: a program goes over the columns of its rows more than once.

What it reads again it has just read, so it comes from the L2 cache. The gradients of weight and
bias need another pass over the tensors, by columns.
"""

import triton
import triton.language as tl

from slipstream.ops.activation.kernels import widen
from slipstream.ops.norm.kernels import (
    affine,
    inside_of,
    load_affine,
    load_tile,
    load_weight,
    normed_tile,
    store_gradients,
    store_partial,
    sum_tile,
)


@triton.jit(do_not_specialize=["num_rows"])
def norm_wide_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, s_ptr, stats_ptr,
    stride_x, stride_residual, num_rows, eps, offset,
    D: tl.constexpr, LAYER: tl.constexpr, LLAMA: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As ``norm_fwd_kernel``: a pass for the mean, one for the squares, one to write."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    mean = tl.zeros((BLOCK_T,), tl.float32)
    if LAYER:
        acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        for first in tl.range(0, D, BLOCK_D, num_stages=STAGES):
            columns = first + tl.arange(0, BLOCK_D)
            inside = inside_of(rows, columns, num_rows, D)
            acc += sum_tile(
                x_ptr, residual_ptr, rows, columns, stride_x, stride_residual, inside, D, ACTIVATION
            ).to(tl.float32)
        mean = tl.sum(acc, 1) / D
        tl.store(stats_ptr + num_rows + rows, mean, mask=rows < num_rows)
    acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for first in tl.range(0, D, BLOCK_D, num_stages=STAGES):
        columns = first + tl.arange(0, BLOCK_D)
        inside = inside_of(rows, columns, num_rows, D)
        s = sum_tile(
            x_ptr, residual_ptr, rows, columns, stride_x, stride_residual, inside, D, ACTIVATION
        )
        c = tl.where(inside, widen(s) - mean[:, None], 0.0)
        acc += c * c
    rstd = tl.rsqrt(tl.sum(acc, 1) / D + eps)
    tl.store(stats_ptr + rows, rstd, mask=rows < num_rows)
    for first in tl.range(0, D, BLOCK_D, num_stages=STAGES):
        columns = first + tl.arange(0, BLOCK_D)
        inside = inside_of(rows, columns, num_rows, D)
        out = rows[:, None] * D + columns[None, :]
        s = sum_tile(
            x_ptr, residual_ptr, rows, columns, stride_x, stride_residual, inside, D, ACTIVATION
        )
        if s_ptr is not None:
            tl.store(s_ptr + out, s.to(DTYPE), mask=inside)
        weight, bias = load_affine(weight_ptr, bias_ptr, columns, offset, DTYPE, D, LLAMA)
        n = (widen(s) - mean[:, None]) * rstd[:, None]
        y = affine(n, weight, bias, bias_ptr is not None, DTYPE, LLAMA)
        tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def norm_wide_bwd_kernel(
    dy_ptr, ds_ptr, s_ptr, x_ptr, weight_ptr, bias_ptr, stats_ptr,
    dx_ptr, dresidual_ptr, y_ptr,
    stride_dy, stride_ds, stride_s, stride_x, num_rows, offset,
    D: tl.constexpr, LAYER: tl.constexpr, LLAMA: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As ``norm_bwd_kernel`` without weight and bias: a pass for the row sums, one to write."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty if s_ptr is None else s_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    sum_gn = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    sum_g = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for first in tl.range(0, D, BLOCK_D, num_stages=STAGES):
        columns = first + tl.arange(0, BLOCK_D)
        inside = inside_of(rows, columns, num_rows, D)
        weight = load_weight(weight_ptr, columns, offset, DTYPE, D, LLAMA)
        n, _, _ = normed_tile(
            s_ptr, x_ptr, stats_ptr, rows, columns, stride_s, stride_x, num_rows, inside,
            D, LAYER, ACTIVATION,
        )  # fmt: skip
        dy = widen(load_tile(dy_ptr, rows, columns, stride_dy, inside, D))
        g = dy * weight[None, :]
        sum_gn += g * n
        sum_g += g
    mean_gn, mean_g = tl.sum(sum_gn, 1) / D, tl.sum(sum_g, 1) / D
    for first in tl.range(0, D, BLOCK_D, num_stages=STAGES):
        columns = first + tl.arange(0, BLOCK_D)
        inside = inside_of(rows, columns, num_rows, D)
        weight, bias = load_affine(weight_ptr, bias_ptr, columns, offset, DTYPE, D, LLAMA)
        n, rstd, slope = normed_tile(
            s_ptr, x_ptr, stats_ptr, rows, columns, stride_s, stride_x, num_rows, inside,
            D, LAYER, ACTIVATION,
        )  # fmt: skip
        if y_ptr is not None:
            y = affine(n, weight, bias, bias_ptr is not None, DTYPE, LLAMA)
            out = rows[:, None] * D + columns[None, :]
            tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=inside)
        if dx_ptr is not None or dresidual_ptr is not None:
            dy = widen(load_tile(dy_ptr, rows, columns, stride_dy, inside, D))
            grad = dy * weight[None, :] - n * mean_gn[:, None]
            if LAYER:
                grad -= mean_g[:, None]
            store_gradients(
                grad * rstd[:, None], slope, ds_ptr, dx_ptr, dresidual_ptr, rows, columns,
                stride_ds, inside, D, ACTIVATION,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def norm_wide_bwd_weight_kernel(
    dy_ptr, s_ptr, x_ptr, stats_ptr, partial_ptr, stride_dy, stride_s, stride_x, num_rows,
    D: tl.constexpr, LAYER: tl.constexpr, ACTIVATION: tl.constexpr,
    DWEIGHT: tl.constexpr, DBIAS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums for weight and bias over every ``num_programs(1)``-th block of rows, by columns."""
    columns = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    dweight = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    dbias = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    blocks = tl.cdiv(num_rows, BLOCK_T)
    for block in tl.range(tl.program_id(1), blocks, tl.num_programs(1), num_stages=STAGES):
        rows = block * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
        inside = inside_of(rows, columns, num_rows, D)
        dy = widen(load_tile(dy_ptr, rows, columns, stride_dy, inside, D))
        if DWEIGHT:
            n, _, _ = normed_tile(
                s_ptr, x_ptr, stats_ptr, rows, columns, stride_s, stride_x, num_rows, inside,
                D, LAYER, ACTIVATION,
            )  # fmt: skip
            dweight += dy * n
        if DBIAS:
            dbias += dy
    store_partial(partial_ptr, tl.program_id(1), dweight, dbias, columns, D, DWEIGHT, DBIAS)
