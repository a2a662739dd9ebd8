"""Sums of squares: one partial sum per chunk, then one program that adds them in order."""

import triton
import triton.language as tl


@triton.jit
def grad_norm_partial_kernel(
    grad_ptr, chunks_ptr, addresses_ptr, partial_ptr, num_elements,
    GRAD: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """``partial[c] = sum(grad[chunk c]^2)``; ``chunks_ptr``: see ``ops.scattered``, else flat."""
    program = tl.program_id(0).to(tl.int64)
    if chunks_ptr is None:
        source = grad_ptr + program * CHUNK
        count = num_elements - program * CHUNK
    else:
        address = tl.load(addresses_ptr + tl.load(chunks_ptr + 4 * program + 1))
        source = address.to(tl.pointer_type(GRAD)) + tl.load(chunks_ptr + 4 * program + 2)
        count = tl.load(chunks_ptr + 4 * program + 3)
        if ALIGNED:
            source = tl.multiple_of(source, 16)
    lane = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    if count >= CHUNK:
        for step in tl.static_range(CHUNK // BLOCK):
            grad = tl.load(source + step * BLOCK + lane).to(tl.float32)
            acc += grad * grad
    else:
        for step in tl.static_range(CHUNK // BLOCK):
            at = step * BLOCK + lane
            grad = tl.load(source + at, mask=at < count, other=0.0).to(tl.float32)
            acc += grad * grad
    tl.store(partial_ptr + program, tl.sum(acc, 0))


@triton.jit(do_not_specialize=["num_partials"])
def grad_norm_total_kernel(partial_ptr, out_ptr, num_partials, BLOCK: tl.constexpr):
    """``out = sqrt(sum(partial))``, summed in fp64."""
    lane = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float64)
    for start in tl.range(0, num_partials, BLOCK):
        at = start + lane
        acc += tl.load(partial_ptr + at, mask=at < num_partials, other=0.0).to(tl.float64)
    total = tl.sum(acc, 0).to(tl.float32)
    tl.store(out_ptr, tl.sqrt_rn(total))
