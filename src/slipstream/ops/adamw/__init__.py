"""AdamW over lists of tensors, with clipping and the non-finite guard folded in."""

from collections.abc import Sequence
from typing import Any

import torch

from slipstream.errors import ShapeError
from slipstream.ops import check, dispatch
from slipstream.ops.adamw.fused import adamw_fused
from slipstream.ops.adamw.options import AdamWOptions
from slipstream.ops.adamw.reference import adamw_reference
from slipstream.ops.dispatch import Refusal

Tensors = Sequence[torch.Tensor]


def adamw(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    *,
    options: AdamWOptions,
    masters: Tensors | None = None,
    grad_divisor: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
) -> None:
    """One AdamW step in place (Loshchilov and Hutter, arXiv 1711.05101).

    ``params``, ``grads``, ``exp_avgs``, ``exp_avg_sqs`` have the same shapes; the moments are fp32.
    ``steps``: one fp32 scalar tensor each, the number of steps taken, counted up here. ``masters``:
    fp32 copies of low-precision ``params``; they are updated and ``params`` receive them rounded.
    ``grad_divisor`` (fp32 scalar tensor) divides the gradients; where ``skip`` (bool scalar
    tensor) is true nothing changes at all. No host synchronisation. ``grads`` may be overwritten.
    Raises ShapeError.
    """
    counts = {len(group) for group in (params, grads, exp_avgs, exp_avg_sqs, steps)}
    if len(counts) != 1 or (masters is not None and len(masters) != len(params)):
        raise ShapeError("adamw: params, grads, moments, steps and masters differ in number")
    if masters is None and any(p.dtype in (torch.bfloat16, torch.float16) for p in params):
        raise ShapeError("adamw: 16-bit params need fp32 masters")
    groups = {"grad": grads, "exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs}
    for name, group in {**groups, "master": params if masters is None else masters}.items():
        for param, tensor in zip(params, group, strict=True):
            check.shape("adamw", name, tensor, *param.shape)
    if not params:
        return
    device = params[0].device
    divisor = torch.ones((), device=device) if grad_divisor is None else grad_divisor
    skipped = torch.zeros((), dtype=torch.bool, device=device) if skip is None else skip
    dispatch.call(
        "adamw", params, grads, exp_avgs, exp_avg_sqs, steps, masters, divisor, skipped, options
    )


def _refuse_fused(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    masters: Tensors | None,
    *_: Any,
) -> Refusal | None:
    if torch.compiler.is_compiling():
        return Refusal(reason="PyTorch's fused AdamW cannot be traced; the compiler fuses the rest")
    device = params[0].device.type
    if device not in ("cpu", "cuda"):
        return Refusal(reason=f"PyTorch has no fused AdamW for {device}")
    if any(not p.is_floating_point() for p in params):
        return Refusal(reason="a parameter is not a floating-point tensor")
    weights = params if masters is None else masters
    for weight, *moments in zip(weights, exp_avgs, exp_avg_sqs, strict=True):
        if any(moment.dtype != weight.dtype for moment in moments):
            return Refusal(reason="it wants weights and moments of one dtype")
        # Its kernel walks memory in storage order, whatever the strides.
        if not all(tensor.is_contiguous() for tensor in (weight, *moments)):
            return Refusal(
                reason="a weight or one of its moments is not contiguous",
                remedy="make parameters and optimizer state contiguous",
            )
    return None


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    params = [torch.randn(8, 8, device=device, dtype=dtype)]
    zeros = [torch.zeros(8, 8, device=device)]
    masters = None if dtype == torch.float32 else [params[0].float()]
    scalar = torch.zeros((), device=device)
    options = AdamWOptions(lr=1e-3)
    skip = scalar.bool()
    return (
        params,
        [torch.randn_like(params[0])],
        zeros,
        [z.clone() for z in zeros],
        [scalar],
        masters,
        scalar + 1,
        skip,
        options,
    ), {}


dispatch.register(
    "adamw",
    ("fused", adamw_fused, _refuse_fused),
    ("reference", adamw_reference, None),
    example=_example,
)

__all__ = ["AdamWOptions", "adamw"]
