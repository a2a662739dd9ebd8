"""Products of bf16 tokens with an fp32 router on tensor cores: fp32 operands as sums of bf16 parts.

An fp32 number is the sum of three bf16 numbers, exactly; a bf16 token times a bf16 part is exact in
fp32. Parts are made once, before the products, whose loops then only copy and multiply bf16. WIDE:
multiply in fp32, for Triton's interpreter, whose bf16 products are wrong.
"""

import triton
import triton.language as tl


@triton.jit
def _dot(a, b, acc, WIDE: tl.constexpr):
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        # The number keeps the compiler from adding up in a later product's accumulator.
        return tl.dot(a, b, acc, max_num_imprecise_acc=2**30)


@triton.jit(do_not_specialize=["rows"])
def moe_router_split_kernel(
    wide_ptr, part_ptr, rows, WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """``part[p]``: the p-th bf16 part of every element of a matrix."""
    size = rows.to(tl.int64) * WIDTH
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rest = tl.load(wide_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    for p in tl.static_range(PARTS):
        part = rest.to(tl.bfloat16)
        tl.store(part_ptr + p * size + i, part, mask=i < size)
        rest -= part.to(tl.float32)


@triton.jit(do_not_specialize=["T"])
def moe_router_fwd_kernel(
    x_ptr, part_ptr, logits_ptr, T,
    E: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``logits = x @ (sum of parts)^T``; programs of one tile of tokens are neighbours.

    Tensor cores truncate when they accumulate, which over many columns is a bias: a block of
    columns is summed there, the blocks outside, where sums are rounded.
    """
    program, blocks_e = tl.program_id(0), tl.cdiv(E, BLOCK_E)
    t = (program // blocks_e).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = (program % blocks_e) * BLOCK_E + tl.arange(0, BLOCK_E)
    acc = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        inside = (t < T)[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + t[:, None] * D + d[None, :], mask=inside, other=0.0)
        block = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
        # Smallest parts first.
        for p in tl.static_range(PARTS - 1, -1, -1):
            w_ptr = part_ptr + p * E * D + e[None, :] * D + d[:, None]
            w = tl.load(w_ptr, mask=(e < E)[None, :] & (d < D)[:, None], other=0.0)
            block = _dot(x, w, block, WIDE)
        acc += block
    inside = (t < T)[:, None] & (e < E)[None, :]
    tl.store(logits_ptr + t[:, None] * E + e[None, :], acc, mask=inside)


@triton.jit
def _halves(dlogits_ptr, t, e, T, E: tl.constexpr):
    """A tile of both parts of dlogits."""
    inside = (t < T)[:, None] & (e < E)[None, :]
    tile_ptr = dlogits_ptr + t[:, None] * E + e[None, :]
    high = tl.load(tile_ptr, mask=inside, other=0.0)
    return high, tl.load(tile_ptr + T.to(tl.int64) * E, mask=inside, other=0.0)


@triton.jit
def _dx_products(
    high, low, part_ptr, e, d, acc,
    E: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    inside = (e < E)[:, None] & (d < D)[None, :]
    w_ptr = part_ptr + e[:, None] * D + d[None, :]
    w = tl.load(w_ptr, mask=inside, other=0.0)
    acc = _dot(high, w, acc, WIDE)
    acc = _dot(low, w, acc, WIDE)
    if PARTS > 1:
        acc = _dot(high, tl.load(w_ptr + E * D, mask=inside, other=0.0), acc, WIDE)
    return acc


@triton.jit(do_not_specialize=["T", "span"])
def moe_router_bwd_dx_kernel(
    dlogits_ptr, part_ptr, passed_ptr, dx_ptr, T, span,
    E: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``dx = passed + dlogits @ router``, to 16 bits of both factors; ``passed`` may be None.

    A program writes ``span`` blocks of columns of its tokens. Where one block holds all experts,
    it reads their parts of dlogits once.
    """
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    start = tl.program_id(1) * span
    end = tl.minimum(start + span, tl.cdiv(D, BLOCK_D))
    all_e = tl.arange(0, BLOCK_E)
    high, low = _halves(dlogits_ptr, t, all_e, T, E)
    for block in tl.range(start, end, num_stages=STAGES):
        d = block * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = (t < T)[:, None] & (d < D)[None, :]
        out = t[:, None] * D + d[None, :]
        acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        if E <= BLOCK_E:
            acc = _dx_products(high, low, part_ptr, all_e, d, acc, E, D, PARTS, WIDE)
        else:
            for first_e in range(0, E, BLOCK_E):
                e = first_e + all_e
                high_e, low_e = _halves(dlogits_ptr, t, e, T, E)
                acc = _dx_products(high_e, low_e, part_ptr, e, d, acc, E, D, PARTS, WIDE)
        if passed_ptr is not None:
            acc += tl.load(passed_ptr + out, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + out, acc.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T", "span"])
def moe_router_bwd_dw_kernel(
    dlogits_ptr, x_ptr, partial_ptr, T, span,
    E: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``partial[s] = dlogits^T @ x`` over the s-th ``span`` of tokens; dlogits come as parts."""
    program, split = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks_e = tl.cdiv(E, BLOCK_E)
    e = (program % blocks_e) * BLOCK_E + tl.arange(0, BLOCK_E)
    d = (program // blocks_e) * BLOCK_D + tl.arange(0, BLOCK_D)
    end = tl.minimum((split + 1) * span, T)
    acc = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    for first in range(0, span, BLOCK_T):
        t = split * span + first + tl.arange(0, BLOCK_T)
        inside = (t < end)[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + t[:, None] * D + d[None, :], mask=inside, other=0.0)
        inside = (t < end)[:, None] & (e < E)[None, :]
        for p in tl.static_range(PARTS):
            tile_ptr = dlogits_ptr + p * T.to(tl.int64) * E + t[:, None] * E + e[None, :]
            acc = _dot(tl.trans(tl.load(tile_ptr, mask=inside, other=0.0)), x, acc, WIDE)
    inside = (e < E)[:, None] & (d < D)[None, :]
    tl.store(partial_ptr + (split * E + e[:, None]) * D + d[None, :], acc, mask=inside)


@triton.jit(do_not_specialize=["splits"])
def moe_router_sum_kernel(
    partial_ptr, out_ptr, splits,
    SIZE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``out = partial.sum(0)`` of fp32 matrices, rounded once."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, splits, BLOCK_S):
        s = first + tl.arange(0, BLOCK_S).to(tl.int64)
        inside = (s < splits)[:, None] & (i < SIZE)[None, :]
        part = tl.load(partial_ptr + s[:, None] * SIZE + i[None, :], mask=inside, other=0.0)
        total += tl.sum(part, axis=0)
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=i < SIZE)
