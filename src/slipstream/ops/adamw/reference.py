"""AdamW in plain PyTorch, all arithmetic in fp32."""

import math
from collections.abc import Sequence

import torch

from slipstream.ops.adamw.options import AdamWOptions

Tensors = Sequence[torch.Tensor]


@torch.no_grad()
def adamw_reference(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    masters: Tensors | None,
    grad_divisor: torch.Tensor,
    skip: torch.Tensor,
    options: AdamWOptions,
) -> None:
    """One step in place; where ``skip`` is true nothing changes, the step count included."""
    keep = ~skip
    for i, (param, grad, m, v, step) in enumerate(
        zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)
    ):
        master = param if masters is None else masters[i]
        g = grad.to(m.dtype) / grad_divisor
        next_step = step + 1
        next_m = torch.lerp(m, g, 1 - options.beta1)
        next_v = options.beta2 * v + (1 - options.beta2) * g * g
        m_hat = next_m / _unseen(options.beta1, next_step)
        v_hat = next_v / _unseen(options.beta2, next_step)
        update = m_hat / (v_hat.sqrt() + options.eps) + options.weight_decay * master
        for state, value in (
            (m, next_m),
            (v, next_v),
            (step, next_step),
            (master, master - options.lr * update),
        ):
            state.copy_(torch.where(keep, value, state))
        if masters is not None:
            param.copy_(master)


def _unseen(beta: float, step: torch.Tensor) -> torch.Tensor:
    # 1 - beta^step; the plain difference loses 3 digits in fp32 at beta = 0.999, step = 1.
    return -torch.expm1(step * (math.log(beta) if beta else -math.inf))
