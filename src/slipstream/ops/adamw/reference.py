"""AdamW in plain PyTorch, all arithmetic in fp32 or wider."""

import math
from collections.abc import Sequence

import torch

from slipstream.ops.adamw.options import AdamWOptions
from slipstream.ops.adamw.philox import noise, rounded
from slipstream.ops.check import compute_dtype
from slipstream.ops.scattered import Grads, as_flat

Tensors = Sequence[torch.Tensor]


@torch.no_grad()
def adamw_reference(
    params: Tensors,
    grads: Grads,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    masters: Tensors | None,
    grad_divisor: torch.Tensor,
    skip: torch.Tensor,
    options: AdamWOptions,
) -> None:
    """One step in place; where ``skip`` is true nothing changes, the step count included."""
    keep, stochastic = ~skip, options.rounding == "stochastic"
    for i, (param, grad, m, v, step) in enumerate(
        zip(params, as_flat(grads), exp_avgs, exp_avg_sqs, steps, strict=True)
    ):
        master = param if masters is None else masters[i]
        wide = compute_dtype(master)
        g = grad.to(wide) / grad_divisor
        next_step = step + 1
        next_m = torch.lerp(m.to(wide), g, 1 - options.beta1)
        next_v = options.beta2 * v.to(wide) + (1 - options.beta2) * g * g
        m_hat = next_m / _unseen(options.beta1, next_step)
        v_hat = next_v / _unseen(options.beta2, next_step)
        weight = master.to(wide)
        bits = noise(grads[i], options.seed, next_step) if stochastic else None
        if bits is not None:
            bits = bits.view_as(weight) ^ weight.float().view(torch.int32)
        update = m_hat / (v_hat.sqrt() + options.eps) + options.weight_decay * weight
        weight = weight - options.lr * update
        for state, value, shift in (
            (m, next_m, 16),
            (v, next_v, 8),
            (step, next_step, None),
            (master, weight, 0),
        ):
            if bits is not None and shift is not None and state.dtype == torch.bfloat16:
                value = rounded(value, (bits >> shift & 0xFFFF).view_as(value))
            state.copy_(torch.where(keep, value.to(state.dtype), state))
        if masters is not None:
            param.copy_(master)
        if options.zero_grads and isinstance(grads[i], torch.Tensor):
            grad.zero_()


def _unseen(beta: float, step: torch.Tensor) -> torch.Tensor:
    # 1 - beta^step; the plain difference loses 3 digits in fp32 at beta = 0.999, step = 1.
    return -torch.expm1(step * (math.log(beta) if beta else -math.inf))
