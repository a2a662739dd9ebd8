"""Kernels over a slab of logits, one program a row, fp32 inside; derivation in README.md.

Rows of the slab start STRIDE elements apart, a multiple of 64: loads and stores run up to STRIDE,
so that they stay wide, and columns from V on are masked in registers. A target outside [0, V) that
is not the ignored one makes the loss and the gradient of its token NaN.
"""

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _logits(row_ptr, c, softcap, CAPPED: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """A block of a row in fp32, softcap applied."""
    if STRIDE % BLOCK == 0:
        z = tl.load(row_ptr + c).to(tl.float32)
    else:
        z = tl.load(row_ptr + c, mask=c < STRIDE, other=0.0).to(tl.float32)
    if CAPPED:
        z = softcap * _tanh(z / softcap)
    return z


@triton.jit
def _inside(z, c, first, other, V: tl.constexpr, BLOCK: tl.constexpr):
    """``z`` with ``other`` from column V on; costs nothing in blocks that end before."""
    if V % BLOCK != 0:
        ends_here = first + BLOCK > V
        if ends_here:
            z = tl.where(c < V, z, other)
    return z


@triton.jit
def _statistics(
    row_ptr, softcap,
    CAPPED: tl.constexpr, MEAN: tl.constexpr,
    V: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """logsumexp of a row in one pass, and the mean of its logits where MEAN."""
    highest = -float("inf")
    total = tl.zeros((BLOCK,), tl.float32)
    plain = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, V, BLOCK, num_stages=STAGES):
        c = first + tl.arange(0, BLOCK)
        z = _logits(row_ptr, c, softcap, CAPPED, STRIDE, BLOCK)
        if MEAN:
            plain += _inside(z, c, first, 0.0, V, BLOCK)
        z = _inside(z, c, first, -float("inf"), V, BLOCK)
        higher = tl.maximum(highest, tl.max(z, axis=0))
        total = total * tl.exp(highest - higher) + tl.exp(z - higher)
        highest = higher
    lse = highest + tl.log(tl.sum(total, axis=0))
    return lse, tl.sum(plain, axis=0) / V


@triton.jit
def _overwrite(
    row_ptr, y, lse, dloss, dlse, smoothing, softcap,
    CAPPED: tl.constexpr, MEAN: tl.constexpr,
    V: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Logits of a row become their gradient, last block first: it was read last, so L2 has it."""
    BLOCKS: tl.constexpr = (V + BLOCK - 1) // BLOCK
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        first = (BLOCKS - 1 - block) * BLOCK
        c = first + tl.arange(0, BLOCK)
        z = _logits(row_ptr, c, softcap, CAPPED, STRIDE, BLOCK)
        z = _inside(z, c, first, 0.0, V, BLOCK)
        dz = tl.exp(z - lse) * (dloss + dlse)
        if MEAN:
            dz -= smoothing / V * dloss
        if (y >= first) & (y < first + BLOCK):
            dz -= tl.where(c == y, (1.0 - smoothing) * dloss, 0.0)
        if CAPPED:
            dz *= 1.0 - (z / softcap) * (z / softcap)
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
    row_ptr, y, lse, mean, smoothing, softcap,
    CAPPED: tl.constexpr, MEAN: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Cross entropy of a token that counts; NaN for a target that does not exist."""
    z = tl.load(row_ptr + y, mask=(y >= 0) & (y < V), other=float("nan")).to(tl.float32)
    if CAPPED:
        z = softcap * _tanh(z / softcap)
    loss = lse - (1.0 - smoothing) * z
    if MEAN:
        loss -= smoothing * mean
    return loss


@triton.jit(do_not_specialize=["ignored"])
def linear_cross_entropy_fwd_kernel(
    slab_ptr, targets_ptr, loss_ptr, lse_ptr, ignored, smoothing, softcap,
    CAPPED: tl.constexpr, MEAN: tl.constexpr,
    V: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Loss (0 where ignored) and logsumexp of every row."""
    row = tl.program_id(0)
    row_ptr = slab_ptr + row.to(tl.int64) * STRIDE
    y = tl.load(targets_ptr + row)
    lse, mean = _statistics(row_ptr, softcap, CAPPED, MEAN, V, STRIDE, BLOCK, STAGES)
    loss = 0.0
    if y != ignored:
        loss = _loss(row_ptr, y, lse, mean, smoothing, softcap, CAPPED, MEAN, V)
    tl.store(loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)


@triton.jit(do_not_specialize=["ignored"])
def linear_cross_entropy_grad_kernel(
    slab_ptr, targets_ptr, loss_ptr, lse_ptr, ignored, smoothing, softcap, z_loss,
    CAPPED: tl.constexpr, MEAN: tl.constexpr,
    V: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Loss and logsumexp, and logits become the gradient of ``loss + z_loss * lse^2``.

    Ignored rows: loss 0, logsumexp inf (so that every probability is 0), zero gradient.
    """
    row = tl.program_id(0)
    row_ptr = slab_ptr + row.to(tl.int64) * STRIDE
    y = tl.load(targets_ptr + row)
    loss = 0.0
    lse = float("inf")
    if y == ignored:
        _zeros(row_ptr, STRIDE, BLOCK)
    else:
        lse, mean = _statistics(row_ptr, softcap, CAPPED, MEAN, V, STRIDE, BLOCK, STAGES)
        loss = _loss(row_ptr, y, lse, mean, smoothing, softcap, CAPPED, MEAN, V)
        dloss = tl.where((y >= 0) & (y < V), 1.0, float("nan"))
        # The target's logit is read before the row is overwritten.
        tl.debug_barrier()
        _overwrite(
            row_ptr, y, lse, dloss, 2.0 * z_loss * lse, smoothing, softcap,
            CAPPED, MEAN, V, STRIDE, BLOCK, STAGES,
        )  # fmt: skip
    tl.store(loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)


@triton.jit(do_not_specialize=["ignored"])
def linear_cross_entropy_bwd_kernel(
    slab_ptr, targets_ptr, lse_ptr, dloss_ptr, dlse_ptr, ignored, smoothing, softcap,
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
        _overwrite(
            row_ptr, y, tl.load(lse_ptr + row), dloss, dlse, smoothing, softcap,
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
