"""The norm of all gradients in one pass, for clipping and for the non-finite guard."""

from collections.abc import Sequence
from typing import Any

import torch

from slipstream.errors import ShapeError
from slipstream.ops import check, dispatch, triton_support
from slipstream.ops.dispatch import Refusal
from slipstream.ops.grad_norm.reference import grad_norm_reference
from slipstream.ops.scattered import Grads, Scattered, samples


def grad_norm(grads: Grads) -> torch.Tensor:
    """Euclidean norm over all elements of ``grads``, an fp32 scalar on their device.

    ``grads``: tensors of any shapes, or ``Scattered`` ones. Not finite where an element is not, or
    where the sum of squares exceeds fp32. Squares are summed in a fixed order: run-to-run bitwise
    equal. No host synchronisation. Raises ShapeError.
    """
    if isinstance(grads, torch.Tensor) or not isinstance(grads, Sequence):
        raise ShapeError(
            f"grad_norm: grads is {check.described(grads)}, expected a list of tensors"
        )
    if not grads:
        raise ShapeError("grad_norm: no gradients; give one tensor or more")
    for grad in grads:
        if not isinstance(grad, torch.Tensor | Scattered):
            raise ShapeError(
                f"grad_norm: a gradient is {check.described(grad)}, expected a tensor; leave it out"
            )
    devices = {grad.device for grad in grads}
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise ShapeError(f"grad_norm: gradients are on {found}; move them to one device")
    return dispatch.call("grad_norm", grads)


def _refuse_triton(grads: Grads) -> Refusal | None:
    if torch.compiler.is_compiling():
        return Refusal(reason="the compiler fuses the rest")
    refusals = (triton_support.refusal(grad, products=False) for grad in samples(grads))
    return next((refusal for refusal in refusals if refusal is not None), None)


def _grad_norm_triton(grads: Grads) -> torch.Tensor:
    from slipstream.ops.grad_norm.launch import grad_norm_triton  # noqa: PLC0415

    return grad_norm_triton(grads)


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    return ([torch.randn(8, 8, device=device, dtype=dtype)],), {}


dispatch.register(
    "grad_norm",
    ("triton", _grad_norm_triton, _refuse_triton),
    ("reference", grad_norm_reference, None),
    example=_example,
)

__all__ = ["grad_norm"]
