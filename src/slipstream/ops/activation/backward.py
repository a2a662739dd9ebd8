"""Gradient of the activations from the pre-activation, for ops that save nothing else."""

import torch

from slipstream.ops.activation.reference import apply
from slipstream.ops.check import compute_dtype


def activation_backward(
    gate: torch.Tensor, up: torch.Tensor | None, dout: torch.Tensor, gating: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of ``gate`` and ``up`` of ``activation_reference``, computed in fp32."""
    wide = compute_dtype(gate)
    x, grad = gate.to(wide), dout.to(wide)
    dup = None
    if up is not None:
        dup = (grad * apply(x, gating)).to(up.dtype)
        grad = grad * up.to(wide)
    return _derivative(x, grad, gating).to(gate.dtype), dup


def _derivative(x: torch.Tensor, grad: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "silu":
        return torch.ops.aten.silu_backward(grad, x)
    if kind == "relu2":
        return grad * 2 * x.clamp(min=0)
    return torch.ops.aten.gelu_backward(
        grad, x, approximate="tanh" if kind == "gelu_tanh" else "none"
    )
