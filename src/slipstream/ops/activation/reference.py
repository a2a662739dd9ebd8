"""Activations in plain PyTorch, computed in fp32."""

import torch
import torch.nn.functional as F

from slipstream.ops.check import compute_dtype


def apply(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The ungated function ``kind`` of ``x`` in the dtype of ``x``."""
    if kind == "silu":
        return F.silu(x)
    if kind == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def activation_reference(gate: torch.Tensor, up: torch.Tensor | None, gating: str) -> torch.Tensor:
    """``f(gate)``, times ``up`` where given; the product is rounded once."""
    wide = compute_dtype(gate)
    value = apply(gate.to(wide), gating)
    if up is not None:
        value = value * up.to(wide)
    return value.to(gate.dtype)
