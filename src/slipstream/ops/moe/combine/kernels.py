"""Rows of experts back to tokens, and tokens out to the rows of experts, in fixed order.

A program takes ``BLOCK_T`` tokens (slots for the dots) and ``BLOCK_D`` columns.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def moe_gather_sum_kernel(
    rows_ptr, weight_ptr, position_ptr, offsets_ptr, shared_ptr, residual_ptr, out_ptr, num_tokens,
    E: tl.constexpr, TOP_K: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``out[t] = sum_k weight[t, k] * rows[position[t, k]] + shared[t] + residual[t]``.

    Summed in fp32, k ascending; slots of no expert are left out. ``weight_ptr`` None: ones.
    ``STRIDE``: between tokens of ``out``, ``shared`` and ``residual``.
    """
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    valid = tokens < num_tokens
    inside = valid[:, None] & (columns < D)[None, :]
    at_token = tokens[:, None] * STRIDE + columns[None, :]
    present = tl.load(offsets_ptr + E).to(tl.int64)
    acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for k in tl.range(0, TOP_K, loop_unroll_factor=TOP_K if TOP_K <= 8 else 8):
        position = tl.load(position_ptr + tokens * TOP_K + k, mask=valid, other=0)
        here = inside & (position < present)[:, None]
        pointers = rows_ptr + position[:, None] * D + columns[None, :]
        row = tl.load(pointers, mask=here, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + tokens * TOP_K + k, mask=valid, other=0.0)
            row *= weight.to(tl.float32)[:, None]
        acc += row
    if shared_ptr is not None:
        acc += tl.load(shared_ptr + at_token, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + at_token, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at_token, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def moe_spread_rows_kernel(
    x_ptr, weight_ptr, position_ptr, offsets_ptr, out_ptr, num_tokens,
    E: tl.constexpr, TOP_K: tl.constexpr, D: tl.constexpr, ZERO: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``out[position[t, k]] = weight[t, k] * x[t]``: a token is read once, its rows written.

    Rows of no expert are set to zero where ``ZERO``, else not written. ``weight_ptr`` None: ones.
    """
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    valid = tokens < num_tokens
    inside = valid[:, None] & (columns < D)[None, :]
    present = tl.load(offsets_ptr + E).to(tl.int64)
    x = tl.load(x_ptr + tokens[:, None] * D + columns[None, :], mask=inside, other=0.0)
    for k in tl.range(0, TOP_K, loop_unroll_factor=TOP_K if TOP_K <= 8 else 8):
        position = tl.load(position_ptr + tokens * TOP_K + k, mask=valid, other=0)
        row = x
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + tokens * TOP_K + k, mask=valid, other=0.0)
            row = (x.to(tl.float32) * weight.to(tl.float32)[:, None]).to(x.dtype)
        here = (position < present)[:, None]
        pointers = out_ptr + position[:, None] * D + columns[None, :]
        if ZERO:
            tl.store(pointers, tl.where(here, row, 0.0), mask=inside)
        else:
            tl.store(pointers, row, mask=inside & here)


@triton.jit(do_not_specialize=["num_slots"])
def moe_slot_dots_kernel(
    dout_ptr, rows_ptr, position_ptr, offsets_ptr, out_ptr, num_slots,
    E: tl.constexpr, TOP_K: tl.constexpr, D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``out[t, k] = dout[t] . rows[position[t, k]]`` in fp32; zero for slots of no expert."""
    slots = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid = slots < num_slots
    position = tl.load(position_ptr + slots, mask=valid, other=0)
    here = valid & (position < tl.load(offsets_ptr + E).to(tl.int64))
    acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for d in tl.range(0, D, BLOCK_D):
        columns = d + tl.arange(0, BLOCK_D)
        inside = here[:, None] & (columns < D)[None, :]
        dout = dout_ptr + (slots // TOP_K)[:, None] * D + columns[None, :]
        row = rows_ptr + position[:, None] * D + columns[None, :]
        product = tl.load(dout, mask=inside, other=0.0).to(tl.float32)
        acc += product * tl.load(row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + slots, tl.sum(acc, 1), mask=valid)
