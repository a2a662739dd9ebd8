"""Kernels over a slab of logits, one program a row, fp32 inside; derivation in README.md.

Rows of the slab start STRIDE elements apart, a multiple of 64: loads and stores run up to STRIDE,
so that they stay wide, and columns from V on are masked in registers. A target outside [0, V) that
is not the ignored one makes the loss and the gradient of its token NaN.
"""

import triton
import triton.language as tl

from slipstream.ops.activation.kernels import power_of_2, reciprocal
from slipstream.ops.elementary import exponential


@triton.jit
def _tanh(x):
    """Hyperbolic tangent, within two units in the last place also where it is small."""
    size = tl.abs(x)
    # 1 - 2 / (1 + exp(2x)) has no digits left of a small x: there x + x^3 P(x^2), P minimax by
    # Lawson's iteration, relative error 2.8e-9.
    square = x * x
    series = 0.020795971155166626 - 0.005895158275961876 * square
    series = -0.33333298563957214 + square * (
        0.13331924378871918 + square * (-0.053783830255270004 + square * series)
    )
    large = 1.0 - 2.0 * reciprocal(1.0 + power_of_2(2.8853900817779268 * size))
    return tl.where(size < 0.6, x + x * square * series, tl.where(x < 0, -large, large))


@triton.jit
def _capped(z, softcap, CAPPED: tl.constexpr):
    """Logits in units of softcap, where there is one: their tanh."""
    if CAPPED:
        return _tanh(z * tl.div_rn(1.0, softcap))
    else:
        return z


@triton.jit
def _between(u, v, softcap, CAPPED: tl.constexpr):
    """``u - v`` of capped values as logits: the difference first, which is exact if it is small."""
    if CAPPED:
        return softcap * (u - v)
    else:
        return u - v


@triton.jit
def _logits(row_ptr, c, softcap, CAPPED: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """A block of a row in fp32, capped."""
    if STRIDE % BLOCK == 0:
        z = tl.load(row_ptr + c).to(tl.float32)
    else:
        z = tl.load(row_ptr + c, mask=c < STRIDE, other=0.0).to(tl.float32)
    return _capped(z, softcap, CAPPED)


@triton.jit
def _inside(z, c, first, other, V: tl.constexpr, BLOCK: tl.constexpr):
    """``z`` with ``other`` from column V on; costs nothing in blocks that end before."""
    if V % BLOCK != 0:
        ends_here = first + BLOCK > V
        if ends_here:
            z = tl.where(c < V, z, other)
    return z


@triton.jit
def _exp(x, dtype: tl.constexpr):
    """``exp(x)``; exact to the last place where logits are fp32, which costs a few instructions."""
    if dtype == tl.float32:
        return exponential(x)
    else:
        return tl.exp(x)


@triton.jit
def _statistics(
    row_ptr, softcap,
    CAPPED: tl.constexpr, MEAN: tl.constexpr,
    V: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Highest capped logit of a row, ``sum exp(z - highest)``, and its distance to their mean.

    All in one pass; without MEAN the distance is 0.
    """
    highest = -float("inf")
    origin = 0.0
    total = tl.zeros((BLOCK,), tl.float32)
    beyond = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, V, BLOCK, num_stages=STAGES):
        c = first + tl.arange(0, BLOCK)
        z = _logits(row_ptr, c, softcap, CAPPED, STRIDE, BLOCK)
        z = _inside(z, c, first, -float("inf"), V, BLOCK)
        higher = tl.maximum(highest, tl.max(z, axis=0))
        if MEAN:
            # Sums of logits that have an offset in common would be rounded by its size.
            origin = tl.where(first == 0, higher, origin)
            beyond += _inside(z - origin, c, first, 0.0, V, BLOCK)
        moved = _exp(_between(highest, higher, softcap, CAPPED), row_ptr.dtype.element_ty)
        power = _exp(_between(z, higher, softcap, CAPPED), row_ptr.dtype.element_ty)
        total = total * moved + power
        highest = higher
    below = 0.0
    if MEAN:
        below = _between(highest - origin, tl.sum(beyond, axis=0) / V, softcap, CAPPED)
    return highest, tl.sum(total, axis=0), below


@triton.jit
def _overwrite(
    row_ptr, y, highest, factor, dloss, smoothing, softcap,
    CAPPED: tl.constexpr, MEAN: tl.constexpr,
    V: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Logits of a row become their gradient, last block first: it was read last, so L2 has it.

    ``factor * exp(z - highest)``: the probability times the gradients of loss and logsumexp.
    """
    BLOCKS: tl.constexpr = (V + BLOCK - 1) // BLOCK
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        first = (BLOCKS - 1 - block) * BLOCK
        c = first + tl.arange(0, BLOCK)
        z = _logits(row_ptr, c, softcap, CAPPED, STRIDE, BLOCK)
        z = _inside(z, c, first, 0.0, V, BLOCK)
        dz = _exp(_between(z, highest, softcap, CAPPED), row_ptr.dtype.element_ty) * factor
        if MEAN:
            dz -= smoothing / V * dloss
        if (y >= first) & (y < first + BLOCK):
            dz -= tl.where(c == y, (1.0 - smoothing) * dloss, 0.0)
        if CAPPED:
            dz *= 1.0 - z * z
        if STRIDE % BLOCK == 0:
            tl.store(row_ptr + c, dz.to(row_ptr.dtype.element_ty))
        else:
            tl.store(row_ptr + c, dz.to(row_ptr.dtype.element_ty), mask=c < STRIDE)


@triton.jit
def _zeros(row_ptr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    for first in tl.range(0, STRIDE, BLOCK):
        c = first + tl.arange(0, BLOCK)
        tl.store(row_ptr + c, tl.zeros((BLOCK,), row_ptr.dtype.element_ty), mask=c < STRIDE)


@triton.jit
def _loss(
    row_ptr, y, highest, log_total, below, smoothing, softcap,
    CAPPED: tl.constexpr, MEAN: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Cross entropy of a token that counts; NaN for a target that does not exist."""
    z = tl.load(row_ptr + y, mask=(y >= 0) & (y < V), other=float("nan")).to(tl.float32)
    # lse - z would have the rounding of lse, which may be far larger than the loss.
    missing = _between(highest, _capped(z, softcap, CAPPED), softcap, CAPPED)
    if MEAN:
        missing = (1.0 - smoothing) * missing + smoothing * below
    return log_total + missing


@triton.jit(do_not_specialize=["ignored"])
def linear_cross_entropy_fwd_kernel(
    slab_ptr, targets_ptr, loss_ptr, lse_ptr, highest_ptr, total_ptr, ignored, smoothing, softcap,
    CAPPED: tl.constexpr, MEAN: tl.constexpr,
    V: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Loss (0 where ignored) and logsumexp of every row, and what backward makes of it."""
    row = tl.program_id(0)
    row_ptr = slab_ptr + row.to(tl.int64) * STRIDE
    y = tl.load(targets_ptr + row)
    highest, total, below = _statistics(row_ptr, softcap, CAPPED, MEAN, V, STRIDE, BLOCK, STAGES)
    log = tl.log(total)
    loss = 0.0
    if y != ignored:
        loss = _loss(row_ptr, y, highest, log, below, smoothing, softcap, CAPPED, MEAN, V)
    tl.store(loss_ptr + row, loss)
    tl.store(lse_ptr + row, _between(highest, 0.0, softcap, CAPPED) + log)
    tl.store(highest_ptr + row, highest)
    tl.store(total_ptr + row, total)


@triton.jit(do_not_specialize=["ignored"])
def linear_cross_entropy_grad_kernel(
    slab_ptr, targets_ptr, loss_ptr, lse_ptr, ignored, smoothing, softcap, z_loss,
    CAPPED: tl.constexpr, MEAN: tl.constexpr,
    V: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Loss and logsumexp, and logits become the gradient of ``loss + z_loss * lse^2``.

    Ignored rows: loss and logsumexp 0, zero gradient.
    """
    row = tl.program_id(0)
    row_ptr = slab_ptr + row.to(tl.int64) * STRIDE
    y = tl.load(targets_ptr + row)
    loss = 0.0
    lse = 0.0
    if y == ignored:
        _zeros(row_ptr, STRIDE, BLOCK)
    else:
        highest, total, below = _statistics(
            row_ptr, softcap, CAPPED, MEAN, V, STRIDE, BLOCK, STAGES
        )
        log = tl.log(total)
        lse = _between(highest, 0.0, softcap, CAPPED) + log
        loss = _loss(row_ptr, y, highest, log, below, smoothing, softcap, CAPPED, MEAN, V)
        dloss = tl.where((y >= 0) & (y < V), 1.0, float("nan"))
        # exp(z - lse) would have the rounding of lse, relative to a probability of nearly 1.
        factor = tl.div_rn(dloss + 2.0 * z_loss * lse, total)
        # The target's logit is read before the row is overwritten.
        tl.debug_barrier()
        _overwrite(
            row_ptr, y, highest, factor, dloss, smoothing, softcap,
            CAPPED, MEAN, V, STRIDE, BLOCK, STAGES,
        )  # fmt: skip
    tl.store(loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)


@triton.jit(do_not_specialize=["ignored"])
def linear_cross_entropy_bwd_kernel(
    slab_ptr, targets_ptr, highest_ptr, total_ptr, dloss_ptr, dlse_ptr, ignored, smoothing, softcap,
    CAPPED: tl.constexpr, MEAN: tl.constexpr,
    V: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Logits become their gradient, from those of each token's loss and logsumexp."""
    row = tl.program_id(0)
    row_ptr = slab_ptr + row.to(tl.int64) * STRIDE
    y = tl.load(targets_ptr + row)
    dlse = tl.load(dlse_ptr + row)
    dloss = 0.0
    if y != ignored:
        dloss = tl.load(dloss_ptr + row)
        dloss = tl.where((y >= 0) & (y < V), dloss, float("nan"))
    if (y == ignored) & (dlse == 0.0):
        _zeros(row_ptr, STRIDE, BLOCK)
    else:
        factor = tl.div_rn(dloss + dlse, tl.load(total_ptr + row))
        _overwrite(
            row_ptr, y, tl.load(highest_ptr + row), factor, dloss, smoothing, softcap,
            CAPPED, MEAN, V, STRIDE, BLOCK, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "ignored"])
def linear_cross_entropy_sum_kernel(
    loss_ptr, lse_ptr, targets_ptr, objective_ptr, nll_ptr, z_ptr, tokens_ptr, T, ignored, z_loss,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums over tokens, by one program: always in the same order."""
    nll = tl.zeros((BLOCK,), tl.float32)
    z = tl.zeros((BLOCK,), tl.float32)
    tokens = tl.zeros((BLOCK,), tl.int64)
    for first in tl.range(0, T, BLOCK):
        t = first + tl.arange(0, BLOCK).to(tl.int64)
        kept = (t < T) & (tl.load(targets_ptr + t, mask=t < T, other=0) != ignored)
        nll += tl.load(loss_ptr + t, mask=kept, other=0.0)
        lse = tl.load(lse_ptr + t, mask=kept, other=0.0)
        z += lse * lse
        tokens += kept.to(tl.int64)
    all_nll = tl.sum(nll, axis=0)
    all_z = tl.sum(z, axis=0)
    tl.store(objective_ptr, all_nll + z_loss * all_z)
    tl.store(nll_ptr, all_nll)
    tl.store(z_ptr, all_z)
    tl.store(tokens_ptr, tl.sum(tokens, axis=0))


@triton.jit
def linear_cross_entropy_scale_kernel(
    in_ptr, out_ptr, factor_ptr, size, ADD: tl.constexpr, IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``out = factor * in``, or ``out += factor * in``; nothing is read in place for a factor 1.

    ``size`` is specialized: divisible by 16 or not decides how wide loads are.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factor_ptr)
    wanted = True
    if IN_PLACE:
        wanted = factor != 1.0
    if wanted:
        value = factor * tl.load(in_ptr + i, mask=i < size).to(tl.float32)
        if ADD:
            value += tl.load(out_ptr + i, mask=i < size)
        tl.store(out_ptr + i, value.to(out_ptr.dtype.element_ty), mask=i < size)
