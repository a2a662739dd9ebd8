"""Several linear layers of one input as one matrix product, their weights left where they are.

Forward and backward lay the weights side by side (a view where they already are, as in flat
storage) and run one product each; only the input and the parameters are kept. One product instead
of three also makes one gradient of the input instead of three and two additions.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from slipstream.integrations.hf_optimize_state import hooked, own_forward

_PLAIN = (nn.Parameter, torch.Tensor)


def can_join(linears: Sequence[nn.Module]) -> bool:
    """Whether these are ordinary linear layers: no adapters, quantisation, hooks, distribution."""
    biased = [linear._parameters.get("bias") is not None for linear in linears]
    return all(biased) == any(biased) and all(
        type(linear) is nn.Linear
        and is_plain_weight(linear._parameters["weight"])
        and not own_forward(linear)
        and not hooked(linear)
        for linear in linears
    )


def is_plain_weight(weight: torch.Tensor | None) -> bool:
    """Whether a weight is a whole tensor of this process, of no special kind."""
    return type(weight) in _PLAIN


def adjacent(weights: Sequence[torch.Tensor]) -> bool:
    """Whether the weights follow each other in one storage, so that joining them copies nothing."""
    if torch.compiler.is_compiling():
        return False
    first = weights[0]
    if first.device.type == "meta":
        return False
    at = first.data_ptr()
    for weight in weights:
        if weight.data_ptr() != at or not weight.is_contiguous() or weight.dtype != first.dtype:
            return False
        at += weight.numel() * weight.element_size()
    storage = first.untyped_storage().data_ptr()
    return all(weight.untyped_storage().data_ptr() == storage for weight in weights)


def joint_linear(x: torch.Tensor, linears: Sequence[nn.Module]) -> torch.Tensor:
    """``cat([linear(x) for linear in linears], -1)``, ``(..., D)`` to ``(..., sum of outputs)``.

    Follows autocast as ``nn.Linear`` does. The layers must be ones that ``can_join``.
    """
    weights = [_of(linear, "weight") for linear in linears]
    biased = linears[0]._parameters["bias"] is not None
    biases = [_of(linear, "bias") for linear in linears] if biased else []
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device))
    if torch.compiler.is_compiling():
        weight, bias = _joined(weights, x.dtype), _joined(biases, x.dtype) if biases else None
        return F.linear(x, weight, bias)
    return _Joint.apply(x, len(weights), *weights, *biases)


def _of(linear: nn.Module, name: str) -> torch.Tensor:
    parameter = linear._parameters[name]
    assert parameter is not None
    return parameter


def _joined(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([tensor.to(dtype) for tensor in tensors])


def _side_by_side(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    if not adjacent(weights):
        return _joined(weights, dtype)
    rows = sum(weight.shape[0] for weight in weights)
    return weights[0].as_strided((rows, *weights[0].shape[1:]), weights[0].stride()).to(dtype)


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int, *parameters: torch.Tensor) -> torch.Tensor:
        weights, biases = parameters[:count], parameters[count:]
        weight = _side_by_side(weights, x.dtype)
        ctx.save_for_backward(x, *weights)
        ctx.bias_dtypes = [bias.dtype for bias in biases]
        return F.linear(x, weight, _joined(biases, x.dtype) if biases else None)

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        dy_TO = grads[0].flatten(0, -2)
        dx = dweights = None
        if ctx.needs_input_grad[0]:
            dx = (dy_TO @ _side_by_side(weights, x.dtype)).view_as(x)
        sizes = [weight.shape[0] for weight in weights]
        if any(ctx.needs_input_grad[2 : 2 + len(weights)]):
            parts = (dy_TO.T @ x.flatten(0, -2)).split(sizes)
            dweights = [part.to(w.dtype) for part, w in zip(parts, weights, strict=True)]
        dbiases = []
        if ctx.bias_dtypes:
            sums = dy_TO.sum(0, dtype=torch.promote_types(dy_TO.dtype, torch.float32)).split(sizes)
            dbiases = [part.to(d) for part, d in zip(sums, ctx.bias_dtypes, strict=True)]
        return dx, None, *(dweights or [None] * len(weights)), *dbiases
