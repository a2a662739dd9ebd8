"""AdamW through PyTorch's fused multi-tensor kernel, on a CPU.

On CUDA it subtracts the betas from 1 in fp32, after they were rounded to it: at beta2 = 0.999 every
term of the second moment is off by 1.3e-5 of itself.
"""

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw as torch_adamw

from slipstream.ops.adamw.options import AdamWOptions
from slipstream.ops.scattered import Grads, as_flat

Tensors = Sequence[torch.Tensor]


@torch.no_grad()
def adamw_fused(
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
    """One step in place; gradients hold the divided values afterwards, or zeros if asked to."""
    weights = params if masters is None else masters
    dense = as_flat(grads)
    scaled = [_prepared(grad, weight) for grad, weight in zip(dense, weights, strict=True)]
    torch_adamw(
        list(weights),
        scaled,
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        list(steps),
        fused=True,
        grad_scale=grad_divisor,
        found_inf=skip.float(),
        amsgrad=False,
        beta1=options.beta1,
        beta2=options.beta2,
        lr=options.lr,
        weight_decay=options.weight_decay,
        eps=options.eps,
        maximize=False,
    )
    if masters is not None:
        for param, master in zip(params, masters, strict=True):
            param.copy_(master)
    if options.zero_grads:
        torch._foreach_zero_(dense)


def _prepared(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # Contiguous too: the kernel walks memory in storage order.
    return grad.to(weight.dtype).contiguous()
