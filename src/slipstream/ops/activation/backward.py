"""Gradient of the activations from the pre-activation, for ops that save nothing else."""

import torch

from slipstream.ops.activation.reference import ALPHA, LIMIT, apply
from slipstream.ops.check import compute_dtype


def activation_backward(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    dout: torch.Tensor,
    gating: str,
    alpha: float = ALPHA,
    limit: float = LIMIT,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of ``gate`` and ``up`` of ``activation_reference``, computed in fp32."""
    wide = compute_dtype(gate)
    x, grad = gate.to(wide), dout.to(wide)
    if up is None:
        return _derivative(x, grad, gating).to(gate.dtype), None
    if gating == "clamped":
        dgate, dup = _clamped(x, up.to(wide), grad, alpha, limit)
    else:
        dgate, dup = _derivative(x, grad * up.to(wide), gating), grad * apply(x, gating)
    return dgate.to(gate.dtype), dup.to(up.dtype)


def _clamped(
    gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, alpha: float, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x, factor = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
    sigmoid = torch.sigmoid(alpha * x)
    slope = sigmoid * (1 + alpha * x * (1 - sigmoid))
    # A value on the edge of the clamp still counts as inside, as in PyTorch.
    dgate = (grad * factor * slope).masked_fill(gate > limit, 0)
    return dgate, (grad * x * sigmoid).masked_fill(up.abs() > limit, 0)


def _derivative(x: torch.Tensor, grad: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "silu":
        return torch.ops.aten.silu_backward(grad, x)
    if kind == "relu2":
        return grad * 2 * x.clamp(min=0)
    return torch.ops.aten.gelu_backward(
        grad, x, approximate="tanh" if kind == "gelu_tanh" else "none"
    )
