"""Launches of the AdamW kernels: one for the scalars and one for the elements, per bucket."""

import math

import torch
import triton.language as tl

from slipstream.ops.adamw import tuned
from slipstream.ops.adamw.kernels import SCALARS, adamw_begin_kernel, adamw_kernel
from slipstream.ops.adamw.options import AdamWOptions
from slipstream.ops.scattered import Grads, Scattered
from slipstream.ops.triton_support import cdiv

TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
QUARTERS = 4


@torch.no_grad()
def adamw_triton(
    params: list[torch.Tensor],
    grads: Grads,
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    steps: list[torch.Tensor],
    masters: list[torch.Tensor] | None,
    grad_divisor: torch.Tensor,
    skip: torch.Tensor,
    options: AdamWOptions,
) -> None:
    """One step in place; nothing here waits for the device."""
    scalars = _begin(steps, grad_divisor, skip, options)
    for i, param in enumerate(params):
        if param.numel():
            master = None if masters is None else masters[i]
            _update(param, master, grads[i], exp_avgs[i], exp_avg_sqs[i], scalars[i], options)


def _begin(
    steps: list[torch.Tensor],
    grad_divisor: torch.Tensor,
    skip: torch.Tensor,
    options: AdamWOptions,
) -> torch.Tensor:
    """Count up and return the scalars of every bucket, one launch for all of them."""
    counts = steps[0] if len(steps) == 1 else torch.stack(steps)
    scalars = torch.empty(len(steps), SCALARS.value, dtype=torch.float32, device=counts.device)
    adamw_begin_kernel[(len(steps),)](
        counts, grad_divisor, skip, scalars, _log(options.beta1), _log(options.beta2), num_warps=1
    )
    if len(steps) > 1:
        torch._foreach_copy_(steps, list(counts.unbind()))
    return scalars


def _update(
    param: torch.Tensor,
    master: torch.Tensor | None,
    grad: torch.Tensor | Scattered,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scalars: torch.Tensor,
    options: AdamWOptions,
) -> None:
    shorter = exp_avg.dtype if master is not None else param.dtype
    stochastic = options.rounding == "stochastic" and torch.bfloat16 in (shorter, exp_avg.dtype)
    config = tuned.lookup(param.device, stochastic)
    dense = chunks = addresses = None
    if isinstance(grad, Scattered):
        chunks, addresses = grad.layout.chunks(config.block, param.device), grad.addresses
        programs, aligned = len(chunks), grad.aligned
    else:
        dense = grad.contiguous()
        programs, aligned = cdiv(param.numel(), config.block), True
    adamw_kernel[(programs,)](
        param, master, dense, exp_avg, exp_avg_sq, scalars, chunks, addresses, param.numel(),
        options.lr, options.beta1, 1 - options.beta1, options.beta2, 1 - options.beta2,
        options.eps, options.weight_decay, options.seed,
        GRAD=TL_DTYPES[grad.dtype], ALIGNED=aligned, STOCHASTIC=stochastic,
        ZERO=options.zero_grads, QUARTERS=QUARTERS if stochastic else 1,
        BLOCK=config.block, num_warps=config.num_warps,
    )  # fmt: skip
    if options.zero_grads and isinstance(grad, torch.Tensor) and dense is not grad:
        grad.zero_()


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf
