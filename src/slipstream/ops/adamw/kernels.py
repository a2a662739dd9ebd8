"""AdamW over a flat bucket: one pass that reads and writes every tensor once.

A program takes ``BLOCK`` elements, a whole number of ``UNIT`` in stochastic rounding. A Philox call
gives four words: element i of the four quarters of a unit shares one.
"""

import triton
import triton.language as tl

SCALARS = tl.constexpr(8)
"""Room for what ``adamw_begin_kernel`` writes of a bucket: kept (0 or 1), 1 / divisor, the two bias
corrections, step; 32 bytes, so that all buckets have the same alignment."""
UNIT = tl.constexpr(4096)
ROUNDS = tl.constexpr(7)


@triton.jit(do_not_specialize_on_alignment=["step_ptr", "divisor_ptr", "skip_ptr"])
def adamw_begin_kernel(step_ptr, divisor_ptr, skip_ptr, scalars_ptr, log_beta1, log_beta2):
    """Count the steps unless they are skipped; what the elements of a bucket need, in fp32."""
    bucket = tl.program_id(0)
    scalars_ptr += bucket * SCALARS
    kept = tl.load(skip_ptr) == 0
    step = tl.load(step_ptr + bucket) + 1.0
    tl.store(step_ptr + bucket, step, mask=kept)
    tl.store(scalars_ptr, kept.to(tl.float32))
    tl.store(scalars_ptr + 1, tl.div_rn(1.0, tl.load(divisor_ptr).to(tl.float32)))
    # In fp64: 1 - beta^t of two near numbers would lose three digits.
    unseen1 = 1.0 - tl.exp(step.to(tl.float64) * log_beta1)
    unseen2 = 1.0 - tl.exp(step.to(tl.float64) * log_beta2)
    tl.store(scalars_ptr + 2, (1.0 / unseen1).to(tl.float32))
    tl.store(scalars_ptr + 3, (1.0 / unseen2).to(tl.float32))
    tl.store(scalars_ptr + 4, step)


@triton.jit
def _rounded(x, noise):
    # To bf16, up with the probability of what is cut off; NaN and infinity stay.
    bits = (x.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
    return tl.where(tl.abs(x) < float("inf"), bits.to(tl.float32, bitcast=True), x)


@triton.jit
def _stored(pointers, x, noise, mask, STOCHASTIC: tl.constexpr):
    if STOCHASTIC and pointers.dtype.element_ty == tl.bfloat16:
        x = _rounded(x, noise)
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["seed"])
def adamw_kernel(
    param_ptr, master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, scalars_ptr,
    chunks_ptr, addresses_ptr, num_elements,
    lr, beta1, gain1, beta2, gain2, eps, weight_decay, seed,
    GRAD: tl.constexpr, ALIGNED: tl.constexpr, STOCHASTIC: tl.constexpr, ZERO: tl.constexpr,
    QUARTERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``param`` and the moments in place, from ``grad`` or, with ``chunks``, gradients elsewhere.

    ``master_ptr`` None: the parameter is its own. ``gain`` is ``1 - beta`` rounded once.
    ``chunks_ptr (chunks, 4)``, ``addresses_ptr``: see ``ops.scattered``; pieces end in padding up
    to a multiple of 64 elements, which is written too. ``QUARTERS``: 4 in stochastic rounding.
    """
    program = tl.program_id(0).to(tl.int64)
    if chunks_ptr is None:
        start = program * BLOCK
        count = num_elements - start
        given = count
        source = grad_ptr + start
    else:
        start = tl.multiple_of(tl.load(chunks_ptr + 4 * program), 64)
        address = tl.load(addresses_ptr + tl.load(chunks_ptr + 4 * program + 1))
        given = tl.load(chunks_ptr + 4 * program + 3)
        count = tl.multiple_of((given + 63) // 64 * 64, 64)
        source = address.to(tl.pointer_type(GRAD)) + tl.load(chunks_ptr + 4 * program + 2)
        if ALIGNED:
            source = tl.multiple_of(source, 16)
    kept = tl.load(scalars_ptr) != 0.0
    count = tl.where(kept, count, 0)
    scale, rescale1 = tl.load(scalars_ptr + 1), tl.load(scalars_ptr + 2)
    rescale2, step = tl.load(scalars_ptr + 3), tl.load(scalars_ptr + 4).to(tl.uint32)
    QUARTER: tl.constexpr = (UNIT if STOCHASTIC else BLOCK) // QUARTERS
    lane = tl.arange(0, QUARTER)
    for unit in tl.static_range(BLOCK // (QUARTER * QUARTERS)):
        if STOCHASTIC:
            counter = start + unit * UNIT + lane
            low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
            words = tl.philox(seed, low, high, step + low * 0, low * 0, ROUNDS)
        else:
            words = (0,)
        for quarter in tl.static_range(QUARTERS):
            at = (unit * QUARTERS + quarter) * QUARTER + lane
            inside = at < count
            if given >= BLOCK:
                grad = tl.load(source + at)
            else:
                grad = tl.load(source + at, mask=at < given, other=0.0)
            g = grad.to(tl.float32) * scale
            weight_ptr = param_ptr if master_ptr is None else master_ptr
            weight = tl.load(weight_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
            # Still uniform, and in the threads that hold the weight: with the plain words the
            # compiler brings each of their three parts to those on its own.
            bits = words[quarter] ^ weight.to(tl.uint32, bitcast=True) if STOCHASTIC else 0
            m = tl.load(exp_avg_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(exp_avg_sq_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
            m = beta1 * m + gain1 * g
            v = beta2 * v + gain2 * (g * g)
            root = tl.sqrt(v * rescale2) if STOCHASTIC else tl.sqrt_rn(v * rescale2)
            update = (m * rescale1) / (root + eps)
            weight -= lr * (update + weight_decay * weight)
            low, mid, high = (bits & 0xFFFF, (bits >> 8) & 0xFFFF, bits >> 16)
            if master_ptr is not None:
                tl.store(master_ptr + start + at, weight, mask=inside)
            _stored(param_ptr + start + at, weight, low, inside, STOCHASTIC and master_ptr is None)
            _stored(exp_avg_ptr + start + at, m, high, inside, STOCHASTIC)
            _stored(exp_avg_sq_ptr + start + at, v, mid, inside, STOCHASTIC)
            if ZERO:
                # Last: no load waits behind a store to a line that is still on its way.
                tl.store(source + at, tl.zeros_like(grad), mask=at < given)
