"""AdamW over lists of tensors, with clipping and the non-finite guard folded in."""

import math
from collections.abc import Sequence
from typing import Any, get_args

import torch

from slipstream.errors import ShapeError
from slipstream.ops import check, dispatch, triton_support
from slipstream.ops.adamw.fused import adamw_fused
from slipstream.ops.adamw.options import AdamWOptions, Rounding
from slipstream.ops.adamw.reference import adamw_reference
from slipstream.ops.dispatch import Refusal
from slipstream.ops.scattered import Grads, Scattered, samples

Tensors = Sequence[torch.Tensor]
SHORT = (torch.bfloat16, torch.float16)


def adamw(
    params: Tensors,
    grads: Grads,
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

    ``params``, ``grads``, ``exp_avgs``, ``exp_avg_sqs`` have the same shapes; the moments are fp32,
    or bf16 with 16-bit params. ``grads`` of a flat bucket may be ``Scattered``. ``steps``: one
    fp32 scalar tensor each, the number of steps taken, counted up here. ``masters``: fp32 copies
    of 16-bit ``params``; they are updated and ``params`` receive them rounded. Without them
    ``options.rounding`` says how. ``grad_divisor`` (fp32 scalar tensor) divides the gradients;
    where ``skip`` (bool scalar tensor) is true nothing changes at all, except what
    ``options.zero_grads`` asks for. No host synchronisation; arithmetic in fp32. ``grads`` may be
    overwritten. Raises ShapeError.
    """
    counts = {len(group) for group in (params, grads, exp_avgs, exp_avg_sqs, steps)}
    if len(counts) != 1 or (masters is not None and len(masters) != len(params)):
        raise ShapeError("adamw: params, grads, moments, steps and masters differ in number")
    _check_options(options)
    _check_rounding(params, masters, options)
    groups = {"grad": grads, "exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs}
    for name, group in {**groups, "master": params if masters is None else masters}.items():
        for param, tensor in zip(params, group, strict=True):
            if not isinstance(tensor, Scattered):
                check.shape("adamw", name, tensor, *param.shape)
            elif tensor.shape != param.shape:
                raise ShapeError(
                    f"adamw: {name} is of a bucket of {tensor.layout.num_elements} elements, its "
                    f"param has shape {tuple(param.shape)}; give that bucket"
                )
    if not params:
        return
    _check_dtypes(params, exp_avgs, exp_avg_sqs, steps, masters)
    device = params[0].device
    divisor = torch.ones((), device=device) if grad_divisor is None else grad_divisor
    skipped = torch.zeros((), dtype=torch.bool, device=device) if skip is None else skip
    dispatch.call(
        "adamw", params, grads, exp_avgs, exp_avg_sqs, steps, masters, divisor, skipped, options
    )


def _check_options(options: AdamWOptions) -> None:
    rules = [
        ("lr", 0 <= options.lr < math.inf, "a number of at least 0"),
        ("beta1", 0 <= options.beta1 < 1, "a number in [0, 1)"),
        ("beta2", 0 <= options.beta2 < 1, "a number in [0, 1)"),
        ("eps", 0 < options.eps < math.inf, "a number above 0"),
        ("weight_decay", 0 <= options.weight_decay < math.inf, "a number of at least 0"),
    ]
    for name, holds, allowed in rules:
        if not holds:
            value = getattr(options, name)
            raise ShapeError(f"adamw: options.{name} = {value}, expected {allowed}")


def _check_dtypes(
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    masters: Tensors | None,
) -> None:
    # A kernel would read the bits of another dtype as numbers.
    for i, param in enumerate(params):
        check.floating("adamw", param=param)
        short = (torch.bfloat16,) if param.dtype in SHORT else ()
        wide = (torch.float32, torch.float64)
        found = [("exp_avg", exp_avgs[i], short), ("exp_avg_sq", exp_avg_sqs[i], short)]
        found.append(("step", steps[i], ()))
        if masters is not None:
            found.append(("master", masters[i], ()))
        for name, tensor, more in found:
            if tensor.dtype not in (*wide, *more):
                raise ShapeError(
                    f"adamw: {name} is {tensor.dtype} beside a param of {param.dtype}, expected "
                    f"{' or '.join(map(str, (torch.float32, *more)))}"
                )


def _check_rounding(params: Tensors, masters: Tensors | None, options: AdamWOptions) -> None:
    if options.rounding not in (None, *get_args(Rounding)):
        raise ShapeError(
            f"adamw: rounding = {options.rounding!r}, expected None, nearest or stochastic"
        )
    if masters is not None:
        return
    if options.rounding is None and any(p.dtype in SHORT for p in params):
        raise ShapeError(
            "adamw: 16-bit params need fp32 masters, or options.rounding = 'stochastic'"
        )
    if options.rounding == "stochastic" and any(p.dtype == torch.float16 for p in params):
        raise ShapeError(
            "adamw: rounding = 'stochastic' is for bf16, a param is fp16; give fp32 masters"
        )


def _refuse_triton(
    params: Tensors,
    grads: Grads,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    masters: Tensors | None,
    divisor: torch.Tensor,
    skip: torch.Tensor,
    options: AdamWOptions,
) -> Refusal | None:
    if torch.compiler.is_compiling():
        return Refusal(reason="its kernels change tensors in place, which the compiler fuses too")
    weights = params if masters is None else masters
    exact = options.rounding == "stochastic" and masters is None
    for tensor in (*params, *weights, *exp_avgs, *exp_avg_sqs):
        refusal = triton_support.refusal(tensor, products=not exact)
        if refusal is not None:
            return refusal
        if not tensor.is_contiguous():
            return Refusal(reason="a weight or one of its moments is not contiguous")
    refusals = (triton_support.refusal(grad, products=False) for grad in samples(grads))
    return next((refusal for refusal in refusals if refusal is not None), None)


def _refuse_fused(
    params: Tensors,
    grads: Grads,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    masters: Tensors | None,
    divisor: torch.Tensor,
    skip: torch.Tensor,
    options: AdamWOptions,
) -> Refusal | None:
    if torch.compiler.is_compiling():
        return Refusal(reason="PyTorch's fused AdamW cannot be traced; the compiler fuses the rest")
    if options.rounding == "stochastic":
        return Refusal(reason="PyTorch's fused AdamW rounds to nearest")
    device = params[0].device.type
    if device == "cuda":
        return Refusal(reason="PyTorch's fused AdamW takes 1 - beta in fp32 from a rounded beta")
    if device != "cpu":
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


def _adamw_triton(*args: Any) -> None:
    from slipstream.ops.adamw.launch import adamw_triton  # noqa: PLC0415

    adamw_triton(*args)


dispatch.register(
    "adamw",
    ("triton", _adamw_triton, _refuse_triton),
    ("fused", adamw_fused, _refuse_fused),
    ("reference", adamw_reference, None),
    example=_example,
)

__all__ = ["AdamWOptions", "adamw"]
