"""Launches of the norm: one per gradient bucket and one for all partial sums."""

import torch
import triton.language as tl

from slipstream.ops.grad_norm.kernels import grad_norm_partial_kernel, grad_norm_total_kernel
from slipstream.ops.scattered import Grads, Scattered
from slipstream.ops.triton_support import cdiv

TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
CHUNK, BLOCK, TOTAL_BLOCK = 1 << 14, 1 << 11, 1 << 12
"""Elements of a partial sum, of a step of it, and partial sums of a step of the total: fixed, so
that the result does not depend on the device."""


@torch.no_grad()
def grad_norm_triton(grads: Grads) -> torch.Tensor:
    """fp32 scalar."""
    device, plans = grads[0].device, []
    for grad in grads:
        if isinstance(grad, Scattered):
            chunks = grad.layout.chunks(CHUNK, device)
            plans.append((None, chunks, grad.addresses, len(chunks), grad))
        else:
            plans.append((grad.contiguous(), None, None, cdiv(grad.numel(), CHUNK), grad))
    total = sum(plan[3] for plan in plans)
    partial = torch.empty(total, dtype=torch.float32, device=device)
    out = torch.empty((), dtype=torch.float32, device=device)
    first = 0
    for dense, chunks, addresses, programs, grad in plans:
        if not programs:
            continue
        grad_norm_partial_kernel[(programs,)](
            dense, chunks, addresses, partial[first:], grad.shape.numel(),
            GRAD=TL_DTYPES[grad.dtype], ALIGNED=chunks is None or grad.aligned,
            BLOCK=BLOCK, CHUNK=CHUNK, num_warps=8,
        )  # fmt: skip
        first += programs
    grad_norm_total_kernel[(1,)](partial, out, total, BLOCK=TOTAL_BLOCK, num_warps=8)
    return out
