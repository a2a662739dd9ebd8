"""Rotary embedding of queries and keys, with an RMS norm of every head before it or without.

A program takes ``ROWS`` rows; a row is one head of one token, ``C`` features. Inputs come in any
layout whose features are side by side (slices of a qkv tensor, transposed gradients). Feature i is
turned with feature i + R; those past 2R pass. ``x_ptr`` None stands for zeros. fp32 maths.
"""

import triton
import triton.language as tl


@triton.jit
def rows_of(block, num_tokens, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Token and head of the rows of a block, and which exist: all (ROWS, 1)."""
    first = tl.cast(block, tl.int64) * ROWS
    i = tl.arange(0, ROWS)[:, None]
    inner = (first % HEADS).to(tl.int32) + i
    token = (first // HEADS).to(tl.int32) + inner // HEADS
    return token, (inner % HEADS).to(tl.int64), first + i < num_tokens.to(tl.int64) * HEADS


@triton.jit
def heads_of(block, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """As ``rows_of`` where all rows are of one token, which is a number then."""
    PARTS: tl.constexpr = HEADS // ROWS
    head = block % PARTS * ROWS + tl.arange(0, ROWS)[:, None]
    return block // PARTS, head.to(tl.int64), tl.full((ROWS, 1), 1, tl.int1)


@triton.jit
def load_part(x_ptr, at, valid, START: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """``SIZE`` features of rows, from feature ``START`` on, in fp32; zeros where there is none.

    The last dimension of ``at``, where rows begin, and of ``valid`` is 1.
    """
    if x_ptr is None or SIZE == 0:
        return tl.zeros_like(at).to(tl.float32) + tl.zeros((BLOCK,), tl.float32)
    else:
        i = tl.arange(0, BLOCK)
        return tl.load(x_ptr + at + (START + i), mask=valid & (i < SIZE), other=0.0).to(tl.float32)


@triton.jit
def store_part(
    out_ptr, at, valid, value, START: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """The counterpart of ``load_part``."""
    i = tl.arange(0, BLOCK)
    value = value.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at + (START + i), value, mask=valid & (i < SIZE))


@triton.jit
def turned(first, second, cos, sin, INVERSE: tl.constexpr):
    """Pairs turned by the angles of the tables, or back."""
    if INVERSE:
        sin = -sin
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def load_weight(
    weight_ptr, dtype, offset, START: tl.constexpr, SIZE: tl.constexpr, LLAMA: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``weight + offset``, rounded where the cast order rounds it."""
    i = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + START + i, mask=i < SIZE, other=0.0).to(tl.float32) + offset
    if LLAMA:
        weight = weight.to(dtype).to(tl.float32)
    return weight


@triton.jit
def weighted(x, rstd, weight, dtype, LLAMA: tl.constexpr):
    """The norm of a head as ``ops.norm`` rounds it."""
    value = x * rstd
    if LLAMA:
        value = value.to(dtype).to(tl.float32)
    return (value * weight).to(dtype).to(tl.float32)


@triton.jit
def turn_rows(
    x_ptr, out_ptr, cos_ptr, sin_ptr, weight_ptr, block, num_tokens, length,
    stride_b, stride_l, stride_h, eps, offset,
    HEADS: tl.constexpr, STRIDE_OUT: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    INVERSE: tl.constexpr, LLAMA: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One block of rows; ``weight_ptr`` None: without the norm."""
    PASSED: tl.constexpr = C - 2 * R
    token, head, valid = rows_of(block, num_tokens, HEADS, ROWS)
    batch = token // length
    position = (token - batch * length).to(tl.int64)
    at = batch.to(tl.int64) * stride_b + position * stride_l + head * stride_h
    to = token.to(tl.int64) * STRIDE_OUT + head * C
    first = load_part(x_ptr, at, valid, 0, R, BLOCK_R)
    second = load_part(x_ptr, at, valid, R, R, BLOCK_R)
    cos = load_part(cos_ptr, position * R, valid, 0, R, BLOCK_R)
    sin = load_part(sin_ptr, position * R, valid, 0, R, BLOCK_R)
    passed = load_part(x_ptr, at, valid, 2 * R, PASSED, BLOCK_P)
    if weight_ptr is not None:
        dtype = out_ptr.dtype.element_ty
        squares = tl.sum(first * first + second * second, 1) + tl.sum(passed * passed, 1)
        rstd = tl.rsqrt(squares / C + eps)[:, None]
        weight = load_weight(weight_ptr, dtype, offset, 0, R, LLAMA, BLOCK_R)
        first = weighted(first, rstd, weight, dtype, LLAMA)
        weight = load_weight(weight_ptr, dtype, offset, R, R, LLAMA, BLOCK_R)
        second = weighted(second, rstd, weight, dtype, LLAMA)
        weight = load_weight(weight_ptr, dtype, offset, 2 * R, PASSED, LLAMA, BLOCK_P)
        passed = weighted(passed, rstd, weight, dtype, LLAMA)
    first, second = turned(first, second, cos, sin, INVERSE)
    store_part(out_ptr, to, valid, first, 0, R, BLOCK_R)
    store_part(out_ptr, to, valid, second, R, R, BLOCK_R)
    if PASSED:
        store_part(out_ptr, to, valid, passed, 2 * R, PASSED, BLOCK_P)


@triton.jit
def copy_rows(
    x_ptr, out_ptr, block, num_tokens, length, stride_b, stride_l, stride_h,
    HEADS: tl.constexpr, STRIDE_OUT: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One block of rows as they are."""
    token, head, valid = rows_of(block, num_tokens, HEADS, ROWS)
    batch = token // length
    position = (token - batch * length).to(tl.int64)
    at = batch.to(tl.int64) * stride_b + position * stride_l + head * stride_h
    to = token.to(tl.int64) * STRIDE_OUT + head * C
    row = load_part(x_ptr, at, valid, 0, C, BLOCK_C)
    store_part(out_ptr, to, valid, row, 0, C, BLOCK_C)


@triton.jit(do_not_specialize=["num_tokens", "length", "q_blocks", "k_blocks"])
def rope_kernel(
    q_ptr, k_ptr, v_ptr, q_out_ptr, k_out_ptr, v_out_ptr, cos_ptr, sin_ptr,
    q_weight_ptr, k_weight_ptr, num_tokens, length, q_blocks, k_blocks,
    stride_qb, stride_ql, stride_qh, stride_kb, stride_kl, stride_kh,
    stride_vb, stride_vl, stride_vh, eps, offset,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr,
    INVERSE: tl.constexpr, LLAMA: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Turn q and k, copy v: programs for the rows of q, then of k, then of v.

    Outputs None are not wanted. A token's outputs are ``STRIDE_Q`` and ``STRIDE_K`` (v as k) apart.
    """
    block = tl.program_id(0)
    if block < q_blocks:
        if q_out_ptr is not None:
            turn_rows(
                q_ptr, q_out_ptr, cos_ptr, sin_ptr, q_weight_ptr, block, num_tokens, length,
                stride_qb, stride_ql, stride_qh, eps, offset,
                H, STRIDE_Q, C, R, INVERSE, LLAMA, ROWS, BLOCK_R, BLOCK_P,
            )  # fmt: skip
    elif block < q_blocks + k_blocks:
        if k_out_ptr is not None:
            turn_rows(
                k_ptr, k_out_ptr, cos_ptr, sin_ptr, k_weight_ptr, block - q_blocks, num_tokens,
                length, stride_kb, stride_kl, stride_kh, eps, offset,
                G, STRIDE_K, C, R, INVERSE, LLAMA, ROWS, BLOCK_R, BLOCK_P,
            )  # fmt: skip
    elif v_out_ptr is not None:
        copy_rows(
            v_ptr, v_out_ptr, block - q_blocks - k_blocks, num_tokens, length,
            stride_vb, stride_vl, stride_vh, G, STRIDE_K, C, ROWS, BLOCK_C,
        )  # fmt: skip


@triton.jit
def turn_back_rows(
    dout_ptr, x_ptr, dx_ptr, cos_ptr, sin_ptr, weight_ptr, dweight_ptr, start, step, end,
    num_tokens, length, stride_db, stride_dl, stride_dh, stride_b, stride_l, stride_h, eps, offset,
    HEADS: tl.constexpr, STRIDE_OUT: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    LLAMA: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Blocks ``start``, ``start + step``, ...: gradients of the rows and, summed, of the weight."""
    PASSED: tl.constexpr = C - 2 * R
    dtype = dx_ptr.dtype.element_ty
    weight_1 = load_weight(weight_ptr, dtype, offset, 0, R, LLAMA, BLOCK_R)
    weight_2 = load_weight(weight_ptr, dtype, offset, R, R, LLAMA, BLOCK_R)
    weight_3 = load_weight(weight_ptr, dtype, offset, 2 * R, PASSED, LLAMA, BLOCK_P)
    total_1 = tl.zeros((ROWS, BLOCK_R), tl.float32)
    total_2 = tl.zeros((ROWS, BLOCK_R), tl.float32)
    total_3 = tl.zeros((ROWS, BLOCK_P), tl.float32)
    for block in tl.range(start, end, step, num_stages=STAGES):
        if HEADS % ROWS == 0:
            token, head, valid = heads_of(block, HEADS, ROWS)
        else:
            token, head, valid = rows_of(block, num_tokens, HEADS, ROWS)
        batch = token // length
        position, batch = (token - batch * length).to(tl.int64), batch.to(tl.int64)
        at_grad = batch * stride_db + position * stride_dl + head * stride_dh
        at = batch * stride_b + position * stride_l + head * stride_h
        to = token.to(tl.int64) * STRIDE_OUT + head * C
        grad_1 = load_part(dout_ptr, at_grad, valid, 0, R, BLOCK_R)
        grad_2 = load_part(dout_ptr, at_grad, valid, R, R, BLOCK_R)
        grad_3 = load_part(dout_ptr, at_grad, valid, 2 * R, PASSED, BLOCK_P)
        x_1 = load_part(x_ptr, at, valid, 0, R, BLOCK_R)
        x_2 = load_part(x_ptr, at, valid, R, R, BLOCK_R)
        x_3 = load_part(x_ptr, at, valid, 2 * R, PASSED, BLOCK_P)
        # One row of the tables where all rows are of one token.
        known = valid if HEADS % ROWS else tl.full((1, 1), 1, tl.int1)
        cos = load_part(cos_ptr, position * R, known, 0, R, BLOCK_R)
        sin = load_part(sin_ptr, position * R, known, 0, R, BLOCK_R)
        grad_1, grad_2 = turned(grad_1, grad_2, cos, sin, True)
        squares = tl.sum(x_1 * x_1 + x_2 * x_2, 1) + tl.sum(x_3 * x_3, 1)
        g_1, g_2, g_3 = grad_1 * weight_1, grad_2 * weight_2, grad_3 * weight_3
        dot = tl.sum(x_1 * g_1 + x_2 * g_2, 1) + tl.sum(x_3 * g_3, 1)
        # Without eps a row that is not there would be normalised to NaN.
        rstd = tl.where(valid, tl.rsqrt(squares / C + eps)[:, None], 0.0)
        mean = dot[:, None] * (rstd * rstd / C)
        x_1, x_2, x_3 = x_1 * rstd, x_2 * rstd, x_3 * rstd
        total_1 += grad_1 * x_1
        total_2 += grad_2 * x_2
        total_3 += grad_3 * x_3
        store_part(dx_ptr, to, valid, g_1 * rstd - x_1 * mean, 0, R, BLOCK_R)
        store_part(dx_ptr, to, valid, g_2 * rstd - x_2 * mean, R, R, BLOCK_R)
        if PASSED:
            store_part(dx_ptr, to, valid, g_3 * rstd - x_3 * mean, 2 * R, PASSED, BLOCK_P)
    store_total(dweight_ptr, total_1, 0, R, BLOCK_R)
    store_total(dweight_ptr, total_2, R, R, BLOCK_R)
    if PASSED:
        store_total(dweight_ptr, total_3, 2 * R, PASSED, BLOCK_P)


@triton.jit
def store_total(dweight_ptr, total, START: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The sum over rows of a part of the gradient of the weight."""
    i = tl.arange(0, BLOCK)
    tl.store(dweight_ptr + START + i, tl.sum(total, 0), mask=i < SIZE)


@triton.jit
def next_block(program, programs, blocks):
    """First block of the next tensor for a program that has done its share of ``blocks``."""
    done = (tl.maximum(blocks - program, 0) + programs - 1) // programs
    return program + done * programs - blocks


@triton.jit(do_not_specialize=["num_tokens", "length", "q_blocks", "k_blocks", "v_blocks"])
def qk_norm_rope_bwd_kernel(
    dq_out_ptr, dk_out_ptr, dv_out_ptr, q_ptr, k_ptr, dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr,
    q_weight_ptr, k_weight_ptr, dweight_ptr, num_tokens, length, q_blocks, k_blocks, v_blocks,
    stride_dqb, stride_dql, stride_dqh, stride_dkb, stride_dkl, stride_dkh,
    stride_dvb, stride_dvl, stride_dvh, stride_qb, stride_ql, stride_qh,
    stride_kb, stride_kl, stride_kh, eps, offset,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr, LLAMA: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradients of q and k before norm and rotation, and a copy of that of v.

    The programs go through the blocks of q, then of k, then of v, in turns. Each writes its part
    of the gradients of both weights to its row of ``dweight (programs, 2, C)``.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    turn_back_rows(
        dq_out_ptr, q_ptr, dq_ptr, cos_ptr, sin_ptr, q_weight_ptr, dweight_ptr + program * 2 * C,
        program, programs, q_blocks, num_tokens, length,
        stride_dqb, stride_dql, stride_dqh, stride_qb, stride_ql, stride_qh, eps, offset,
        H, STRIDE_Q, C, R, LLAMA, ROWS, BLOCK_R, BLOCK_P, STAGES,
    )  # fmt: skip
    start = next_block(program, programs, q_blocks)
    turn_back_rows(
        dk_out_ptr, k_ptr, dk_ptr, cos_ptr, sin_ptr, k_weight_ptr,
        dweight_ptr + (program * 2 + 1) * C, start, programs, k_blocks, num_tokens, length,
        stride_dkb, stride_dkl, stride_dkh, stride_kb, stride_kl, stride_kh, eps, offset,
        G, STRIDE_K, C, R, LLAMA, ROWS, BLOCK_R, BLOCK_P, STAGES,
    )  # fmt: skip
    if dv_ptr is not None:
        start = next_block(start, programs, k_blocks)
        for block in tl.range(start, v_blocks, programs, num_stages=STAGES):
            copy_rows(
                dv_out_ptr, dv_ptr, block, num_tokens, length, stride_dvb, stride_dvl, stride_dvh,
                G, STRIDE_K, C, ROWS, BLOCK_C,
            )  # fmt: skip
