"""Norms of rows that fit in one block: a program keeps whole rows in registers.

Loops over rows load the rows of later turns while earlier ones are summed (``STAGES``), and the
weight's gradient stays in registers until a program has seen all of its rows.
"""

import triton
import triton.language as tl

from slipstream.ops.activation.kernels import COMPILED, gate_function, widen


@triton.jit
def inside_of(rows, columns, num_rows, D: tl.constexpr):
    """Which elements of a tile exist; no test of columns where they fill the block."""
    inside = (rows < num_rows)[:, None]
    if columns.shape[0] != D:
        inside = inside & (columns < D)[None, :]
    return inside


@triton.jit
def load_tile(ptr, rows, columns, stride, inside, D: tl.constexpr):
    """Elements of a tile as they are, zeros where there are none; ``stride`` None: ``D``.

    What divides ``D`` is known when compiling, and with it how wide loads can be.
    """
    at = rows[:, None] * (D if stride is None else stride) + columns[None, :]
    return tl.load(ptr + at, mask=inside, other=0.0)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """``f(x)`` in fp32."""
    value, _ = gate_function(widen(x), 0.0, ACTIVATION)
    return value


@triton.jit
def sum_tile(
    x_ptr, residual_ptr, rows, columns, stride_x, stride_residual, inside,
    D: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """``s = f(x) + residual`` of a tile; a sum is rounded to the dtype of ``x``."""
    s = load_tile(x_ptr, rows, columns, stride_x, inside, D)
    if ACTIVATION is not None:
        s = activated(s, ACTIVATION)
    if residual_ptr is not None:
        residual = load_tile(residual_ptr, rows, columns, stride_residual, inside, D)
        s = (widen(s) + widen(residual)).to(x_ptr.dtype.element_ty)
    return s


@triton.jit
def load_weight(
    weight_ptr, columns, offset, DTYPE: tl.constexpr, D: tl.constexpr, LLAMA: tl.constexpr
):  # fmt: skip
    """``weight + offset`` in fp32, rounded to the dtype of the rows where ``LLAMA``.

    ``offset`` None: zero, without an instruction for it.
    """
    if columns.shape[0] == D:
        weight = widen(tl.load(weight_ptr + columns))
    else:
        weight = widen(tl.load(weight_ptr + columns, mask=columns < D, other=0.0))
    if offset is not None:
        weight += offset
    if LLAMA:
        weight = weight.to(DTYPE).to(tl.float32)
    return weight


@triton.jit
def load_affine(
    weight_ptr, bias_ptr, columns, offset, DTYPE: tl.constexpr, D: tl.constexpr, LLAMA: tl.constexpr
):  # fmt: skip
    """Weight and bias; the latter is the former where there is none."""
    weight = load_weight(weight_ptr, columns, offset, DTYPE, D, LLAMA)
    if bias_ptr is None:
        return weight, weight
    else:
        return weight, load_weight(bias_ptr, columns, None, DTYPE, D, LLAMA)


@triton.jit
def affine(
    n, weight, bias, BIAS: tl.constexpr, DTYPE: tl.constexpr, LLAMA: tl.constexpr
):  # fmt: skip
    """``n * weight + bias``, rounded to ``DTYPE`` once, or after every step where ``LLAMA``."""
    if LLAMA:
        n = n.to(DTYPE).to(tl.float32)
    if LLAMA and BIAS:
        # A product of 16-bit numbers that is rounded and added to would become one instruction
        # that does not round it. This one the compiler leaves alone.
        y = tl.fma(n, tl.broadcast_to(weight[None, :], n.shape), 0.0).to(DTYPE).to(tl.float32)
    else:
        y = n * weight[None, :]
    if BIAS:
        y += bias[None, :]
    return y.to(DTYPE)


@triton.jit(do_not_specialize=["num_rows"])
def norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, s_ptr, stats_ptr,
    stride_x, stride_residual, num_rows, eps, offset,
    D: tl.constexpr, LAYER: tl.constexpr, LLAMA: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``y = norm(s)``; ``s`` where ``s_ptr`` is given; ``1 / sqrt(..)`` and mean of each row."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK_D)
    # Registers for weight and bias would cost an activation, or a mean and a bias, programs that
    # run at a time, and with them more than the wait for what is in the L1 cache.
    LATE: tl.constexpr = STAGES == 1 and (ACTIVATION is not None or LAYER)
    if not LATE:
        weight, bias = load_affine(weight_ptr, bias_ptr, columns, offset, DTYPE, D, LLAMA)
    blocks = tl.cdiv(num_rows, BLOCK_T)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        rows = block * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
        inside = inside_of(rows, columns, num_rows, D)
        out = rows[:, None] * D + columns[None, :]
        s = sum_tile(
            x_ptr, residual_ptr, rows, columns, stride_x, stride_residual, inside, D, ACTIVATION
        )
        if s_ptr is not None:
            tl.store(s_ptr + out, s.to(DTYPE), mask=inside)
        c = widen(s)
        if LAYER:
            mean = tl.sum(c, 1) / D
            tl.store(stats_ptr + num_rows + rows, mean, mask=rows < num_rows)
            c -= mean[:, None]
            if BLOCK_D != D:
                c = tl.where((columns < D)[None, :], c, 0.0)
        rstd = tl.rsqrt(tl.sum(c * c, 1) / D + eps)
        tl.store(stats_ptr + rows, rstd, mask=rows < num_rows)
        if LATE:
            weight, bias = load_affine(weight_ptr, bias_ptr, columns, offset, DTYPE, D, LLAMA)
        # pyrefly: ignore[unbound-name]
        y = affine(c * rstd[:, None], weight, bias, bias_ptr is not None, DTYPE, LLAMA)
        tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def normed_tile(
    s_ptr, x_ptr, stats_ptr, rows, columns, stride_s, stride_x, num_rows, inside,
    D: tl.constexpr, LAYER: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The normalised tile again, ``1 / sqrt(..)`` of its rows, and the activation's derivative.

    ``s_ptr`` None: ``s`` is the activation of ``x``. Without one, the last is ``s``.
    """
    valid = rows < num_rows
    rstd = tl.load(stats_ptr + rows, mask=valid, other=0.0)
    if x_ptr is None:
        n = widen(load_tile(s_ptr, rows, columns, stride_s, inside, D))
        slope = n
    else:
        # Here already: waiting for the sums, it takes fewer registers than what it is made of.
        x = load_tile(x_ptr, rows, columns, stride_x, inside, D)
        n, slope = gate_function(widen(x), 0.0, ACTIVATION)
        if s_ptr is not None:
            n = widen(load_tile(s_ptr, rows, columns, stride_s, inside, D))
    if LAYER:
        n -= tl.load(stats_ptr + num_rows + rows, mask=valid, other=0.0)[:, None]
    return n * rstd[:, None], rstd, slope


@triton.jit
def store_gradients(
    grad, slope, ds_ptr, dx_ptr, dresidual_ptr, rows, columns, stride_ds, inside,
    D: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Add what came back for ``s`` and store the gradients of the residual and of ``x``."""
    out = rows[:, None] * D + columns[None, :]
    if ds_ptr is not None:
        grad += widen(load_tile(ds_ptr, rows, columns, stride_ds, inside, D))
    if dresidual_ptr is not None:
        tl.store(dresidual_ptr + out, grad.to(dresidual_ptr.dtype.element_ty), mask=inside)
    if dx_ptr is not None:
        if ACTIVATION is not None:
            grad *= slope
        tl.store(dx_ptr + out, grad.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_pairs(a, b, more_a, more_b):
    """Of two sums that are made together."""
    return a + more_a, b + more_b


@triton.jit
def sum_pair(a, b):
    """Sums of the rows of both, in one exchange between threads; the interpreter does two."""
    if COMPILED:
        return tl.reduce((a, b), 1, add_pairs)
    else:
        return tl.sum(a, 1), tl.sum(b, 1)


@triton.jit(do_not_specialize=["num_rows"])
def norm_bwd_kernel(
    dy_ptr, ds_ptr, s_ptr, x_ptr, weight_ptr, bias_ptr, stats_ptr,
    dx_ptr, dresidual_ptr, y_ptr, partial_ptr,
    stride_dy, stride_ds, stride_s, stride_x, num_rows, offset,
    D: tl.constexpr, LAYER: tl.constexpr, LLAMA: tl.constexpr, ACTIVATION: tl.constexpr,
    DWEIGHT: tl.constexpr, DBIAS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of ``x`` and residual, ``y`` again, and a program's sums for weight and bias.

    What has no pointer is not made.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty if s_ptr is None else s_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK_D)
    of_y = bias_ptr if y_ptr is not None else None
    weight, bias = load_affine(weight_ptr, of_y, columns, offset, DTYPE, D, LLAMA)
    # A few rows lie in one thread and are added up at once, many are kept apart until the end.
    KEPT: tl.constexpr = BLOCK_T if BLOCK_T > 4 else 1
    dweight = tl.zeros((KEPT, BLOCK_D), tl.float32)
    dbias = tl.zeros((KEPT, BLOCK_D), tl.float32)
    blocks = tl.cdiv(num_rows, BLOCK_T)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        rows = block * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
        inside = inside_of(rows, columns, num_rows, D)
        dy = widen(load_tile(dy_ptr, rows, columns, stride_dy, inside, D))
        n, rstd, slope = normed_tile(
            s_ptr, x_ptr, stats_ptr, rows, columns, stride_s, stride_x, num_rows, inside,
            D, LAYER, ACTIVATION,
        )  # fmt: skip
        if DWEIGHT:
            dweight += sum_rows(dy * n, KEPT)
        if DBIAS:
            dbias += sum_rows(dy, KEPT)
        if dx_ptr is not None or dresidual_ptr is not None:
            g = dy * weight[None, :]
            # In this order, two instructions an element.
            if LAYER and D > 1:
                sum_gn, sum_g = sum_pair(g * n, g)
                grad = tl.fma(n, (sum_gn * (-rstd / D))[:, None], (sum_g * (-rstd / D))[:, None])
            else:
                grad = n * (tl.sum(g * n, 1) * (-rstd / D))[:, None]
            # The only column of a LayerNorm is a constant: the terms cancel, rounding would stay.
            if not LAYER or D > 1:
                grad += g * rstd[:, None]
            store_gradients(
                grad, slope, ds_ptr, dx_ptr, dresidual_ptr, rows, columns, stride_ds, inside, D,
                ACTIVATION,
            )  # fmt: skip
        if y_ptr is not None:
            y = affine(n, weight, bias, bias_ptr is not None, DTYPE, LLAMA)
            out = rows[:, None] * D + columns[None, :]
            tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=inside)
    if DWEIGHT or DBIAS:
        store_partial(partial_ptr, tl.program_id(0), dweight, dbias, columns, D, DWEIGHT, DBIAS)


@triton.jit
def sum_rows(tile, KEPT: tl.constexpr):
    """The tile with ``KEPT`` rows: all of them, or their sum."""
    if KEPT == 1:
        tile = tl.sum(tile, 0, keep_dims=True)
    return tile


@triton.jit
def store_partial(
    partial_ptr, part, dweight, dbias, columns,
    D: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr,
):  # fmt: skip
    """The sums over rows of ``part``: for the weight where wanted, then for the bias."""
    out = partial_ptr + part.to(tl.int64) * (D * (DWEIGHT + DBIAS)) + columns
    if DWEIGHT:
        tl.store(out, tl.sum(dweight, 0), mask=columns < D)
    if DBIAS:
        tl.store(out + D * DWEIGHT, tl.sum(dbias, 0), mask=columns < D)


@triton.jit(do_not_specialize=["num_parts"])
def norm_sum_kernel(
    partial_ptr, dweight_ptr, dbias_ptr, num_parts,
    D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum ``partial`` over its parts, in order; the second axis of the grid is weight, bias."""
    WIDTH: tl.constexpr = 2 * D if dweight_ptr is not None and dbias_ptr is not None else D
    columns = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    source = partial_ptr + tl.program_id(1) * D + columns[None, :]
    acc = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for first in tl.range(0, num_parts, BLOCK_P, num_stages=STAGES):
        parts = first + tl.arange(0, BLOCK_P)
        inside = (parts < num_parts)[:, None] & (columns < D)[None, :]
        acc += tl.load(source + parts.to(tl.int64)[:, None] * WIDTH, mask=inside, other=0.0)
    total = tl.sum(acc, 0)
    if dweight_ptr is None:
        tl.store(dbias_ptr + columns, total.to(dbias_ptr.dtype.element_ty), mask=columns < D)
    elif dbias_ptr is None:
        tl.store(dweight_ptr + columns, total.to(dweight_ptr.dtype.element_ty), mask=columns < D)
    else:
        of_bias = tl.program_id(1) == 1
        inside = (columns < D) & (of_bias == 0)
        tl.store(dweight_ptr + columns, total.to(dweight_ptr.dtype.element_ty), mask=inside)
        inside = (columns < D) & of_bias
        tl.store(dbias_ptr + columns, total.to(dbias_ptr.dtype.element_ty), mask=inside)
